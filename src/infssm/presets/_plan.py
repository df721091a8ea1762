"""What a command would run: configurations grouped by shared task-0 model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infssm.presets._fast import FAST
from infssm.presets._load import main_job
from infssm.train import RunConfig, load_config, merge, parse_overrides, run_path
from infssm.train.config.fitting import fitted
from infssm.train.setup import build, check_config


def plan(
    source: Mapping[str, Any] | Path | None,
    overrides: Sequence[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    data_root: str | None = None,
    out: str | None = None,
    fast_dev_run: bool = False,
) -> list[list[RunConfig]]:
    """Validated configurations, one group per seed; the runs of a group share the first one's task-0 model.

    Without a ``source`` and without a method among the ``overrides``, a group is the main job's methods. Data without a
    model get one that fits (see :func:`~infssm.train.config.fitting.fitted`).
    """
    changes = parse_overrides(overrides)
    base, methods = main_job() if source is None else ({}, ())
    given = {} if source is None else load_config(source).model_dump(mode="json", exclude_unset=True)
    chosen = merge(given, changes)
    load_config(chosen)  # what is wrong in it is told before data are looked at
    base = merge(merge(base, fitted(chosen, data_root)), given)
    fixed: dict[str, Any] = {}
    if out is not None:
        fixed["out"] = out
    if data_root is not None:
        fixed["data"] = {"root": data_root}
    if fast_dev_run:
        fixed["train"] = FAST
    groups = []
    for seed in [None] if seeds is None else seeds:
        group = []
        for method in methods if methods and "method" not in changes else (None,):
            values = base if method is None else {**base, "method": method}
            values = merge(merge(values, changes), fixed if seed is None else {**fixed, "seed": seed})
            group.append(load_config(values))
            check_config(group[-1])
        groups.append(group)
    return groups


def describe(config: RunConfig) -> str:
    """One line on a run after loading its data and building its model: it would really start."""
    setup = build(config, torch.device("cpu"))
    sizes = {part: sum(len(getattr(task, part)) for task in setup.stream) for part in ("train", "val", "test")}
    parameters = sum(p.numel() for p in setup.method.module.parameters())
    epochs = [setup.epochs(t) for t in range(setup.stream.num_tasks)]
    return (
        f"{config.method.name} on {config.data.name}: {setup.stream.num_tasks} tasks of "
        f"{_shares(setup.stream.task_sizes)} classes, {sizes['train']:,} / {sizes['val']:,} / "
        f"{sizes['test']:,} images, {config.model.name} with {parameters:,} parameters, epochs per task {epochs}, "
        f"seed {config.seed} -> {run_path(config)}"
    )


def _shares(sizes: Sequence[int]) -> str:
    """``10`` where all tasks have as many, else ``50, 10, 10``."""
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
