"""The progress of a run, and how it is saved and restored."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.load import config_hash
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.saving.checkpoint import load_checkpoint, save_checkpoint
from infssm.learner.saving.rng import rng_state
from infssm.learner.setup import Setup

if TYPE_CHECKING:
    from infssm.learner.log import Log
    from infssm.learner.store.directory import RunDirectory


class Meter:
    """Sums of loss terms over an epoch; stays on the device until asked."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps: dict[str, int] = {}

    def add(self, terms: dict[str, Tensor]) -> None:
        """Add one step."""
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value.detach()
            self.steps[name] = self.steps.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Mean of each term over the steps that had it."""
        return {name: float(total) / self.steps[name] for name, total in self.sums.items()}


@dataclass
class Position:
    """The next thing to do: ``task``, ``epoch``, ``step`` in it; ``begun`` once ``begin_task`` was called.

    ``at`` counts steps over the whole run; ``best`` is the best epoch of the task so far (file, accuracy, epoch).
    """

    task: int = 0
    epoch: int = 0
    step: int = 0
    begun: bool = False
    at: int = 0
    best: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def known_task(self) -> int:
        """The last task whose classes the method knows."""
        return self.task if self.begun else max(self.task - 1, 0)


@dataclass
class Progress:
    """Everything that changes while a run works, but the method itself."""

    position: Position
    matrix: AccuracyMatrix
    meter: Meter = field(default_factory=Meter)
    optimizer: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    """Set when the run continues inside an epoch."""
    clock: float = field(default_factory=time.monotonic)

    def next_task(self) -> None:
        """The task is over."""
        p = self.position
        self.position = Position(task=p.task + 1, at=p.at, seconds=p.seconds)
        self.optimizer = self.rng = None

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.position.epoch += 1
        self.position.step = 0
        self.rng = None
        self.meter = Meter()

    def tick(self) -> None:
        """Count the time since the last tick."""
        now = time.monotonic()
        self.position.seconds += now - self.clock
        self.clock = now


def save_progress(run: RunDirectory, setup: Setup, progress: Progress, log: Log) -> None:
    """Write the checkpoint ``last.ckpt``."""
    progress.tick()
    save_checkpoint(
        run.last_checkpoint,
        {
            "config": config_hash(setup.config),
            "seed": setup.config.seed,
            "split": setup.stream.split.hash,
            "position": asdict(progress.position),
            "matrix": json.dumps(progress.matrix.to_json()),
            "meter": {"sums": progress.meter.sums, "steps": progress.meter.steps},
            "module": setup.method.module.state_dict(),
            "method": setup.method.state_dict(),
            "optimizer": progress.optimizer,
            "rng": rng_state() if progress.position.step else None,
            "log": log.position,
            "log_digest": log.digest,
        },
    )


def check_belongs(saved: dict[str, Any], setup: Setup) -> None:
    """Refuse to continue a run under another configuration, seed or split."""
    mine = (config_hash(setup.config), setup.config.seed)
    theirs = (saved["config"], saved["seed"])
    if mine != theirs:
        raise ConfigError(
            f"the checkpoint was written with configuration {theirs[0]}, seed {theirs[1]}, not with {mine[0]}, seed "
            f"{mine[1]}: restore config.yaml, or start a new run"
        )
    setup.stream.split.verify(setup.stream.dataset, expected_hash=saved["split"])


def restore_progress(saved: dict[str, Any], setup: Setup) -> Progress:
    """Put method and module back to where the checkpoint was written."""
    load_method(saved, setup)
    progress = Progress(Position(**saved["position"]), AccuracyMatrix.from_json(json.loads(saved["matrix"])))
    progress.optimizer, progress.rng = saved["optimizer"], saved["rng"]
    device = setup.method.context.device
    progress.meter.sums = {name: value.to(device) for name, value in saved["meter"]["sums"].items()}
    progress.meter.steps = saved["meter"]["steps"]
    return progress


def save_best(path: Path, setup: Setup) -> None:
    """Write module and method as they are after the best epoch so far."""
    method = setup.method
    save_checkpoint(path, {"module": method.module.state_dict(), "method": method.state_dict()}, keep_previous=False)


def check_best(run: RunDirectory, progress: Progress) -> None:
    """Raise now, not at the end of the task, if the best epoch so far cannot be read."""
    if progress.position.best is not None:
        try:
            load_checkpoint(run.checkpoints / progress.position.best["file"])
        except CheckpointError as error:
            raise CheckpointError(f"{error}; restore it, or repeat the run with --overwrite") from None


def load_method(saved: dict[str, Any], setup: Setup) -> None:
    """Restore module and method from a checkpoint."""
    try:
        setup.method.load_state_dict(saved["method"])
        setup.method.module.load_state_dict(saved["module"])
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this model and method: {error}") from error
