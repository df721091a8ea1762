"""A run of a second: two tasks of digits, six steps each, a Vim of one small block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.result import Result
from tests.compare import identical

TINY: dict[str, Any] = {
    "data": {"name": "digits", "num_tasks": 2, "train_per_class": 8, "test_per_class": 4},
    "model": {"name": "vim_nano", "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "d_state": 4}},
    "train": {
        "epochs": 2,
        "batch_size": 8,
        "limit_batches": 3,
        "select_best": True,
        "threads": 1,
        "log_every": 1,
        "accelerator": "cpu",
    },
}
GENERATIVE: dict[str, Any] = {
    "name": "mamba_generative_nano",
    "options": {"d_model": 16, "n_layer": 2, "d_state": 4, "side": 4},
}
"""In the place of the Vim, where the method has to generate images."""
OPTIONS: dict[str, dict[str, Any]] = {
    "generative": {"samples": 10},
    "clfd": {"buffer_size": 20},
    "ewc": {"fisher_samples": 8},
    "inf-ssm-exact": {"measure_at": 2},
}


def tiny_config(out: Path, name: str = "seq", options: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    parts = {part: OPTIONS[part] for part in name.split("+") if part in OPTIONS and part != name}
    method = {"name": name, **parts, **OPTIONS.get(name, {}), **(options or {})}
    tiny = {**TINY, "model": GENERATIVE} if name == "generative" else TINY
    values = merge(tiny, {"out": str(out), "method": method})
    return load_config(merge(values, changes))


def final_weights(result: Result) -> dict[str, torch.Tensor]:
    return load_file(result.weights)


def assert_same(one: Result, other: Result) -> None:
    """Bit for bit: all accuracies and all weights."""
    assert one.matrix.to_json() == other.matrix.to_json()
    a, b = final_weights(one), final_weights(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not identical(a[name], b[name])] == []
