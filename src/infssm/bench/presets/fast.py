"""A preset in miniature: its method, options and data layout, two tasks of two steps each, on generated images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infssm.data import write_synthetic
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, to_dict
from infssm.methods import parse_name

FAST = {"epochs": 1, "task0_epochs": 1, "limit_batches": 2}
"""Two steps per task: does it work?"""
_LAYOUTS = ("caltech256", "cifar100", "cub200", "imagenet-r", "speech-digits", "tiny-imagenet-200/train")
_SEQUENCES = ("speech-digits", "stdlib-text", "waves")
_DEPTH = 2
_SMALLER: dict[str, dict[str, Any]] = {
    "ewc": {"fisher_samples": 4},
    "etf": {"steps": 2},
    "lucir": {"finetune_epochs": 1},
}
"""Options that only say how long to measure."""


def fast_dev_config(config: RunConfig, folder: str | os.PathLike[str]) -> RunConfig:
    """A run of ``config`` that takes a second: two tasks, two steps each, a two-layer Vim-nano on 32 x 32 pixels.

    Sequences keep their model, two layers of it. Data sets to download are replaced by generated ones in their layout,
    written under ``folder`` unless they are there; other data sets stay what they are. Results mean nothing; that the
    run passes does.
    """
    known = config.data.name in _LAYOUTS
    done = Path(folder) / f".{config.data.name.replace('/', '-')}"
    if known and not done.exists():
        write_synthetic(config.data.name, Path(folder))
        done.touch()
    sequences = config.data.name in _SEQUENCES
    data: dict[str, Any] = {"train_per_class": 1, "test_per_class": 1, "image_size": None if sequences else 32}
    if config.data.shots is not None:
        data["shots"] = 1  # generated data are too few for a published list
    if known:
        data |= {"root": os.fspath(folder), "num_tasks": 2, "base_classes": None, "tasks": None}
    elif config.data.name in ("digits", "synthetic", "stdlib-text", "waves"):
        data["num_tasks"] = 2
    method = shorter_measurements(config)
    if "inf-ssm-exact" in [component.name for component in parse_name(config.method.name).classes]:
        method["inf-ssm-exact"] = {"measure_at": 1}  # the automatic weight has two steps to be found in
    if isinstance(layers := config.method.options.get("layers"), int):
        method["layers"] = min(layers, _DEPTH)
    changes = {
        "benchmark": None,
        "data": data,
        "model": {"name": config.model.name if sequences else "vim_nano", "weights": None},
        "train": FAST | {"batch_size": 4, "eval_batch_size": 2, "task0": "train", "num_workers": 0},
        "method": method,
        "out": os.fspath(Path(folder) / "runs"),
    }
    values = merge(to_dict(config), changes)
    small = {"n_layer": _DEPTH, "d_model": 16} if sequences else {"depth": _DEPTH, "embed_dim": 16, "patch_size": 8}
    values["model"]["options"] = small
    return load_config(values)


def shorter_measurements(config: RunConfig) -> dict[str, Any]:
    """Changes to a method's options that make it measure for a moment only."""
    return {c.name: _SMALLER[c.name] for c in parse_name(config.method.name).classes if c.name in _SMALLER}
