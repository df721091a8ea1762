"""`AutoWeight`: a regularizer's weight from the drift that unregularized training shows.

The rule: weight = TARGET / (penalty that unregularized training reaches on a new task). On a pre-trained model and on
digits from scratch, the best weight of most distances lay within a factor of 16 of it (docs/results/digits.md).
Where unregularized training hardly drifts, at a low learning rate, the rule holds too much.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods._contract import Batch, BatchLike, Context, Loader, StatePair, TaskInfo
from infssm.methods._distributed import sum_over_processes, world_size
from infssm.methods._losses import cross_entropy
from infssm.methods._step import train_step
from infssm.states import Recorder, logits_of

TARGET = 60.0
_MEASURED = 5
"""Last steps of the probe over which the penalty is averaged."""


class AutoWeight:
    """Measures once, on the first task with an old model, and keeps the weight.

    With a loader a copy of the model is trained for ``steps`` steps and thrown away; the random state is as before
    afterwards. Without one (a user's own loop) the first ``steps`` steps of the task run unregularized and are measured
    as they go.
    """

    def __init__(self, drift: Callable[[StatePair], Tensor], context: Context, steps: int) -> None:
        self.weight: float | None = None
        self._drift = drift
        self._context = context
        self._steps = steps
        self._seen: list[float] = []

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Probe on a copy, where there is something to probe with."""
        if self.weight is None and task.index > 0 and loader is not None:
            devices = [self._context.device] if self._context.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                self._set(self._probe(task, loader))

    def weigh(self, drift: Tensor) -> Tensor:
        """The weighted penalty; 0 while still measuring."""
        if self.weight is not None:
            return self.weight * drift
        self._seen.append(float(drift.detach()))
        if len(self._seen) >= self._steps:
            self._set(self._seen)
        return drift * 0.0

    def _probe(self, task: TaskInfo, loader: Loader) -> list[float]:
        """Penalties of the last steps of plain training from the old model on."""
        context = self._context
        assert context.old is not None
        model = copy.deepcopy(context.module).train()
        optimizer = torch.optim.AdamW(
            (p for p in model.parameters() if p.requires_grad), lr=context.progress.lr or 1e-3
        )
        recorder = Recorder(model, **context.states_options)
        values = []
        for step, batch in enumerate(itertools.islice(_forever(loader, context.device), self._steps)):
            with recorder.recording():
                logits = logits_of(model(batch.x))
            if step >= self._steps - _MEASURED:
                with torch.no_grad():
                    values.append(float(self._drift(StatePair(context.old.states(batch.x), recorder.flat()))))
            train_step(partial(_plain, logits, batch, context.columns(task)), optimizer)
        return values

    def _set(self, values: list[float]) -> None:
        last = torch.tensor(values[-_MEASURED:], dtype=torch.float32).mean().to(self._context.device)
        mean = float(sum_over_processes([last])[0]) / world_size()
        if not math.isfinite(mean):
            raise ConfigError(
                f"weight='auto': the states diverged in {self._steps} unregularized steps (penalty {mean}); lower the "
                "learning rate, or set weight to a number"
            )
        if mean <= 0:
            warnings.warn(
                f"weight='auto': the states did not move in {self._steps} unregularized steps, so nothing is held; "
                "raise probe_steps beyond the warm-up, or set weight to a number",
                stacklevel=2,
            )
        self.weight, self._seen = TARGET / mean if mean > 0 else 0.0, []

    def state_dict(self) -> dict[str, Any]:
        """The weight and the measurements so far."""
        return {"weight": self.weight, "seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.weight, self._seen = state["weight"], list(state["seen"])


def _plain(logits: Tensor, batch: BatchLike, columns: slice) -> dict[str, Tensor]:
    return {"ce": cross_entropy(logits, batch, columns)}


def _forever(loader: Loader, device: torch.device) -> Iterator[BatchLike]:
    """The loader's batches, epoch after epoch, on the device."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            soft = None if batch.soft is None else batch.soft.to(device)
            yield Batch(batch.x.to(device), batch.y.to(device), soft)
        if empty:
            raise ConfigError("weight='auto' measures on the loader given to begin_task, which gave no batch")
