"""Which implementation computes a call: `cpu` (the compiled module), `triton` (CUDA) or `reference` (plain PyTorch)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.checks import expect_floats

BACKENDS = ("reference", "cpu", "triton")

# Narrower floats are widened to float32 first, so autocast does not push a model onto the slow path.
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


# The compiled module, or None if it was not built or cannot be loaded.
NATIVE: ModuleType | None = None
with contextlib.suppress(ImportError):
    NATIVE = importlib.import_module("infssm.ops._native")

# Triton is imported by its first call; INFSSM_TRITON=0 does without it. In its interpreter (how it is tested without a
# GPU) it takes CPU tensors.
TRITON = importlib.util.find_spec("triton") is not None and os.environ.get("INFSSM_TRITON") != "0"
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_plain(tensors: Any) -> bool:
    """Whether all tensors (None: absent) are nonempty float32 CPU tensors: the common case, decided in one loop."""
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype is torch.float32 and tensor.is_cpu and tensor.numel()):
            return False
    return True


def choose(backend: str | None, *tensors: Tensor | None, names: Sequence[str] = ()) -> str:
    """The backend that serves this call: `backend` if given (checked), else the fastest that can.

    With the names of the tensors, those that are not of real floating-point numbers are refused.
    """
    plain = is_plain(tensors)
    if not plain:
        expect_floats(names, tensors)
    if torch.compiler.is_exporting() and backend is None:  # an exported model runs where these kernels are not
        return "reference"
    if NATIVE is not None and backend in (None, "cpu") and plain:
        return "cpu"
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}; None picks the fastest")
    if backend == "reference":
        return backend
    fastest = "triton" if any(tensor is not None and tensor.is_cuda for tensor in tensors) else "cpu"
    obstacle = _obstacle(backend or fastest, tensors)
    if obstacle is not None and backend is not None:
        raise ConfigError(f"backend={backend!r} cannot run this call: {obstacle}; use backend=None or 'reference'")
    # A tensor without elements has no address to hand over; the reference returns its empty result.
    empty = any(tensor is not None and tensor.numel() == 0 for tensor in tensors)
    return "reference" if obstacle is not None or empty else backend or fastest


def can_fuse(tensors: Any) -> bool:
    """Whether a layer's operations may run as one operator: compiled kernels, float32 CPU tensors, no autocast, no
    `torch.func` transform, no export.
    """
    if NATIVE is None or torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    return not torch.compiler.is_exporting() and torch._C._get_tracing_state() is None and is_plain(tensors)


def in_float32(tensors: Any) -> list[Any]:
    """The tensors (None: absent) in float32, what the kernels read."""
    return [x if x is None or x.dtype is torch.float32 else x.float() for x in tensors]


def _obstacle(backend: str, tensors: tuple[Tensor | None, ...]) -> str | None:
    if backend == "cpu" and NATIVE is None:
        return "infssm.ops._native was not built (reinstall with a C++20 compiler)"
    if backend == "triton" and not TRITON:
        return "Triton is not installed (pip install triton) or switched off (INFSSM_TRITON=0)"
    devices = ("cpu",) if backend == "cpu" else ("cuda", "cpu") if _INTERPRETED else ("cuda",)
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type not in devices:
            return f"a tensor is on {tensor.device}"
        if tensor.dtype not in _DTYPES:
            return f"a tensor is {tensor.dtype}, these kernels compute in float32"
    return None


def backend_report() -> dict[str, Any]:
    """What was found and which backend `backend=None` will run for float32 tensors on the CPU and on CUDA."""
    report: dict[str, Any] = {
        "default": "reference" if NATIVE is None else "cpu",
        "default_cuda": "triton" if TRITON else "reference",
        "native": NATIVE is not None,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
    }
    if NATIVE is not None:
        report["isa"] = NATIVE.isa()
        report["isas"] = list(NATIVE.isas())
        report["module"] = NATIVE.__file__
    return report
