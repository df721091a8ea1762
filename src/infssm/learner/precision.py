"""Whether bfloat16 pays on the CPU of this machine."""

from __future__ import annotations

from functools import partial

import torch

from infssm._timing import measure
from infssm.learner.config.fields import TrainConfig

_UNITS = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}


def bfloat16_unit() -> str | None:
    """The instructions with which this CPU multiplies bfloat16; None where it has none, and float32 is faster."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return next((name for name, flag in _UNITS.items() if getattr(torch.cpu, flag, bool)()), None)


def settle_precision(config: TrainConfig) -> str:
    """``train.precision``; on a CPU that has no instructions for bfloat16, float32 in its place."""
    others = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not others)
    return "32-true" if on_cpu and bfloat16_unit() is None else config.precision


def bfloat16_gain(repeats: int = 5) -> float:
    """How many times as fast as float32 a matrix product in bfloat16 is here, by a measurement of milliseconds."""
    best = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(512, 384, dtype=dtype), torch.ones(384, 384, dtype=dtype)
        best.append(min(measure(partial(torch.mm, x, w), repeats, warmup=0)))
    return best[0] / best[1]
