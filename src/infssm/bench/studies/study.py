"""Studies: functions that return numbers, a figure and a text computed from the numbers; and the run they read."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from infssm._registry import Registry, check_options, suggest
from infssm.data import Split
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.evaluate import evaluate
from infssm.learner.setup import Setup, build, load_weights
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Method
from infssm.ssm import StateSpace, list_distances, record_states

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Study:
    """The outcome of a study: ``data`` is plain JSON values, ``text`` a few sentences computed from it."""

    name: str
    data: dict[str, Any]
    figure: Figure
    text: str

    def save(self, out: str | os.PathLike[str]) -> Path:
        """Write ``<name>.json``, ``<name>.png`` and ``<name>.md`` into ``out`` and return the figure's path."""
        stem = Path(out) / self.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        page = f"# {self.name}\n\n{self.text}\n\n![]({self.name}.png)\n"
        stem.with_suffix(".json").write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(page, encoding="utf-8")
        self.figure.savefig(stem.with_suffix(".png"), dpi=130, bbox_inches="tight")
        return stem.with_suffix(".png")


_STUDIES: Registry[Callable[..., Study]] = Registry("study")
register_study, describe_study = _STUDIES.register, _STUDIES.describe
_LEAST = {"seed": 0, "task": -1}
"""Smallest values of whole numbers that are no counts; task -1 is the last one."""


def list_studies() -> list[str]:
    """Names of all studies."""
    return list(_STUDIES)


def run_study(name: str, **options: Any) -> Study:
    """Run the named study; options are those of its function, with values of its types and counts of at least 1."""
    study = _STUDIES[name]
    lax = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    checked = check_options(f"study {name!r}", study, options, lax)
    for key, value in checked.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < _LEAST.get(key, 1):
            raise ConfigError(f"study {name!r}: {key}={value} is too small")
    return study(**checked)


@dataclass(frozen=True)
class TrainedRun:
    """A run on disk with its data. ``tasks`` counts those whose model was saved."""

    directory: RunDirectory
    setup: Setup
    tasks: int

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, *, data_root: str | None = None, tasks: int = 1) -> TrainedRun:
        """Open a run directory with so many complete tasks; ``data_root`` says where its data is now, if it moved."""
        if path is None:
            raise ConfigError("this study needs a run: give its directory with --run (in Python: run=...)")
        directory = RunDirectory.open(path)
        complete = directory.saved_task() + 1
        if complete < tasks:
            raise ConfigError(f"{directory.path} has {complete} complete task(s); this study needs {tasks}")
        changes = {} if data_root is None else {"data": {"root": data_root}}
        config = load_config(merge(directory.config(), changes))
        setup = build(config, torch.device("cpu"), Split.load(directory.split_path), weights=False)
        return cls(directory, setup, complete)

    @property
    def config(self) -> RunConfig:
        """What was run."""
        return self.setup.config

    def model(self, task: int) -> nn.Module:
        """A copy of the model as it was after a task, in evaluation mode, with the classifier that was trained."""
        method = self.setup.method
        load_weights(method, self.directory.weights_path(self.directory.saved_task(task % self.tasks)))
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


def choose_kinds(kinds: str | Sequence[str]) -> list[str]:
    """Distances by name: ``"all"``, one, several with commas between them, or a list."""
    known = list_distances()
    chosen = known if kinds == "all" else kinds.split(",") if isinstance(kinds, str) else list(kinds)
    for kind in chosen:
        if kind not in known:
            raise ConfigError(f"unknown distance {kind!r}{suggest(kind, known)}")
    return chosen


def axes(columns: int = 1, width: float = 5.0, height: float = 3.4, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A grid of empty axes in the common style, row by row."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("studies draw figures with matplotlib: pip install 'infssm[bench]'") from None
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure, panels
