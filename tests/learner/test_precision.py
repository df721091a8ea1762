"""bfloat16 where the CPU multiplies it; float32 elsewhere, without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infssm.bench.experiment import resolve
from infssm.bench.running import run
from infssm.learner.devices import bfloat16_gain, bfloat16_unit, launch
from tests.learner.tiny import final_weights, tiny_config

UNIT = "infssm.learner.devices.bfloat16_unit"


def product(fabric: Any) -> torch.dtype:
    with fabric.autocast():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("precision", "unit", "expected"),
    [
        ("bf16-mixed", "AMX", torch.bfloat16),
        ("bf16-mixed", None, torch.float32),
        ("32-true", "AMX", torch.float32),
    ],
)
def test_products_follow_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, unit: str | None, expected: torch.dtype
) -> None:
    monkeypatch.setattr(UNIT, lambda: unit)
    assert launch(resolve(tiny_config(tmp_path, train={"precision": precision})).train, product) is expected


def test_without_instructions_a_run_is_that_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNIT, lambda: None)
    mixed, single = (
        final_weights(run(tiny_config(tmp_path, train={"precision": precision}), quiet=True))
        for precision in ("bf16-mixed", "32-true")
    )
    assert all(torch.equal(mixed[key], single[key]) for key in single)


def test_no_instructions_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, flag, lambda: False)
    assert bfloat16_unit() is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert bfloat16_unit() == ("AVX512-BF16" if torch.backends.mkldnn.is_available() else None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert bfloat16_unit() is None


def test_the_gain_is_a_ratio_of_two_times() -> None:
    assert bfloat16_gain(repeats=1) > 0
