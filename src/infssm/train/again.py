"""Test a model that a run saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from infssm.data import Split
from infssm.runs import RunDirectory
from infssm.train._load import load_config, merge
from infssm.train.config import RunConfig
from infssm.train.devices import launch
from infssm.train.evaluate import Accuracy, evaluate_seen
from infssm.train.setup import build, load_weights

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def evaluate_run(
    path: str | os.PathLike[str], task: int | None = None, *, data_root: str | None = None
) -> list[Accuracy]:
    """Test accuracy on tasks 0..task of the weights a run saved after ``task`` (its last task unless given)."""
    run = RunDirectory.open(path)
    wanted = run.saved_task(task)
    changes = {} if data_root is None else {"data": {"root": data_root}}
    config = load_config(merge(run.config(), changes))
    return launch(config.train, _evaluate, config, run, wanted)  # type: ignore[no-any-return]


def _evaluate(fabric: Fabric, config: RunConfig, run: RunDirectory, task: int) -> list[Accuracy]:
    setup = build(config, fabric.device, Split.load(run.split_path), weights=False)
    load_weights(setup.method, run.weights_path(task))
    return evaluate_seen(fabric, setup, task)
