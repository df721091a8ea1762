"""A run directory as studies read it: the models after each task, and the images."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from infssm.data import Split
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.evaluate import evaluate
from infssm.learner.modeling import load_weights
from infssm.learner.setup import Setup, build
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Method
from infssm.ssm import StateSpace, record_states


@dataclass(frozen=True)
class TrainedRun:
    """A run on disk with its data. ``tasks`` counts those whose model was saved."""

    directory: RunDirectory
    setup: Setup
    tasks: int

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, *, data_root: str | None = None) -> TrainedRun:
        """Open a run directory; ``data_root`` says where its data is now, if it moved."""
        if path is None:
            raise ConfigError("this study needs a run: give its directory with --run (in Python: run=...)")
        directory = RunDirectory.open(path)
        changes = {} if data_root is None else {"data": {"root": data_root}}
        config = load_config(merge(directory.config(), changes))
        setup = build(config, torch.device("cpu"), Split.load(directory.split_path), weights=False)
        last = directory.last_task
        if last is None:
            raise ConfigError(f"{path} has no saved model: no task of it is complete")
        lost = sorted(set(range(last + 1)) - set(directory.saved_tasks))
        if lost:
            raise ConfigError(f"{path} has lost {directory.weights_path(lost[0])}: restore it, or run it again")
        return cls(directory, setup, last + 1)

    @property
    def config(self) -> RunConfig:
        """What was run."""
        return self.setup.config

    def need_tasks(self, count: int) -> None:
        """Raise unless so many tasks are complete."""
        if self.tasks < count:
            raise ConfigError(f"{self.directory.path} has {self.tasks} complete task(s); this study needs {count}")

    def model(self, task: int) -> nn.Module:
        """A copy of the model as it was after a task, in evaluation mode, with the classifier that was trained."""
        method = self.setup.method
        load_weights(method, self.directory.weights_path(task % self.tasks))
        method.head.withdraw()  # a fitted one may run the model twice, and another beside it
        return copy.deepcopy(method.module).eval()

    def images(self, count: int, *, task: int = 0) -> Tensor:
        """The first test images of a task through the evaluation transform: [count, channels, height, width]."""
        batches, collected = [], 0
        for batch in self.setup.eval_loader(self.setup.stream[task], "test"):
            batches.append(batch.x)
            collected += len(batch.x)
            if collected >= count:
                break
        return torch.cat(batches)[:count]

    def accuracy(self, method: Method, task: int) -> float:
        """Accuracy of a method's module on a task's test images, among the classes seen up to that task."""
        stream_task = self.setup.stream[task]
        setup = replace(self.setup, method=method)
        return evaluate(_fabric(), setup, stream_task, seen=stream_task.classes.stop).value


@cache
def _fabric() -> Any:
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


@torch.no_grad()
def states_of(model: nn.Module, x: Tensor, *, include_dt_bias: bool = True) -> dict[str, list[StateSpace]]:
    """States of ``x: [b, ...]`` by layer, one entry per scan direction."""
    with record_states(model, include_dt_bias=include_dt_bias) as states:
        model(x)
    return dict(states)
