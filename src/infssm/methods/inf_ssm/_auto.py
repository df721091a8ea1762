"""`AutoWeight`: a regularizer's weight from how much the penalty feels a movement of the parameters.

The rule: the weight with which a relative squared change ``m = |θ - θ_old|² / |θ_old|²`` of the state space layers, in
the direction of plain training, costs ``STRENGTH · m``. Penalty and ``m`` both grow with the square of the distance
from the old model, so that neither the learning rate nor the number of measured steps decides the weight.
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
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods._shared.distributed import sum_over_processes, world_size
from infssm.methods._shared.losses import cross_entropy
from infssm.methods._shared.passes import as_batch
from infssm.methods._step import train_step
from infssm.methods.contract import BatchLike, Context, Loader, StatePair, TaskInfo
from infssm.states import Recorder, find_mixers, logits_of

STRENGTH = 1e5
"""Chosen on digits: ``output`` gets weights of about 1,000 to 4,000 at learning rates of 1e-3 and 1e-4.

From 1,000 to 10,000 the weight helps at the higher rate and costs less than a point of AA at the lower one."""
_MEASURED = 5
"""Last steps of the probe over which penalty and movement are added up."""
_RAMP = 4
"""Where the probe was a part of training, the weight rises to its value in this many times the probe's steps."""


class AutoWeight:
    """Measures once, on the first task with an old model, and keeps the weight.

    With a loader a copy of the model is trained for ``steps`` steps and thrown away; the random state is as before
    afterwards. Without one (a user's own loop) the first ``steps`` steps of the task run unregularized and are measured
    as they go; from there the weight rises step by step.
    """

    def __init__(self, drift: Callable[[StatePair], Tensor], context: Context, steps: int) -> None:
        self.weight: float | None = None
        self._drift = drift
        self._context = context
        self._steps = steps
        self._seen: list[tuple[float, float]] = []
        self._to_ramp = 0

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Probe on a copy, where there is something to probe with."""
        if self.weight is None and task.index > 0 and loader is not None:
            devices = [self._context.device] if self._context.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                self._set(self._probe(task, loader))

    def weigh(self, drift: Tensor) -> Tensor:
        """The weighted penalty; 0 while still measuring."""
        if self.weight is not None:
            self._to_ramp = max(self._to_ramp - 1, 0)
            return (1 - self._to_ramp / (_RAMP * self._steps)) * self.weight * drift
        self._seen.append((self._moved(self._context.module), float(drift.detach())))
        if len(self._seen) >= self._steps:
            self._set(self._seen)
            self._to_ramp = _RAMP * self._steps
        return drift * 0.0

    @torch.no_grad()
    def _moved(self, module: nn.Module) -> float:
        """Relative squared change of the state space layers' parameters from the old model."""
        assert self._context.old is not None
        models = (module, self._context.old.module)
        new, old = (
            [p.double() for mixer in find_mixers(m, self._context.layers).values() for p in mixer.parameters()]
            for m in models
        )
        change = sum((n - o).square().sum() for n, o in zip(new, old, strict=True))
        return float(change / sum(o.square().sum() for o in old))

    def _probe(self, task: TaskInfo, loader: Loader) -> list[tuple[float, float]]:
        """Movement and penalty in the last steps of plain training from the old model on."""
        context = self._context
        assert context.old is not None
        model = copy.deepcopy(context.module).train()
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=context.progress.lr or 1e-3)
        recorder = Recorder(model, **context.states_options)
        values = []
        for step, batch in enumerate(itertools.islice(_forever(loader, context.device), self._steps)):
            x = batch if isinstance(batch, Mapping) else batch.x
            with recorder.recording():
                output = model(**x) if isinstance(x, Mapping) else model(x)
            if step >= self._steps - _MEASURED:
                with torch.no_grad():
                    drift = self._drift(StatePair(context.old.states(x), recorder.flat()))
                values.append((self._moved(model), float(drift)))
            train_step(partial(_plain, output, batch, context.columns(task)), optimizer)
        return values

    def _set(self, values: list[tuple[float, float]]) -> None:
        sums = torch.tensor(values[-_MEASURED:], dtype=torch.float64).sum(0).to(self._context.device)
        moved, drift = (sum_over_processes([sums])[0] / world_size()).tolist()
        if not (math.isfinite(drift) and math.isfinite(moved)):
            raise ConfigError(
                f"weight='auto': the states diverged in {self._steps} unregularized steps (penalty {drift}); lower the "
                "learning rate, or set weight to a number"
            )
        if drift <= 0:
            warnings.warn(
                f"weight='auto': the states did not move in {self._steps} unregularized steps, so nothing is held; "
                "raise probe_steps beyond the warm-up, or set weight to a number",
                stacklevel=2,
            )
        self.weight, self._seen = STRENGTH * moved / drift if drift > 0 else 0.0, []

    def state_dict(self) -> dict[str, Any]:
        """The weight, the measurements so far, and the steps until the weight is reached."""
        return {"weight": self.weight, "seen": [list(pair) for pair in self._seen], "to_ramp": self._to_ramp}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.weight, self._to_ramp = state["weight"], state["to_ramp"]
        self._seen = [(moved, drift) for moved, drift in state["seen"]]


def _plain(output: Any, batch: BatchLike | Mapping[str, Any], columns: slice) -> dict[str, Tensor]:
    """The model's own loss where its output has one, else cross-entropy; of every token where it predicts tokens."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return {"loss": loss}
    if isinstance(batch, Mapping):
        raise ConfigError("weight='auto': batches of keyword arguments need labels, so that the model returns a loss")
    logits = logits_of(output)
    if logits.ndim == 3:
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch.y.flatten())}
    return {"ce": cross_entropy(logits, batch, columns)}


def _forever(loader: Any, device: torch.device) -> Iterator[BatchLike | Mapping[str, Any]]:
    """The loader's batches, epoch after epoch, on the device; mappings of keyword arguments as they are."""
    source = getattr(loader, "source", loader)
    while True:
        empty = True
        for batch in source:
            empty = False
            if isinstance(batch, Mapping):
                yield {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            else:
                yield as_batch(batch, device)
        if empty:
            raise ConfigError("weight='auto' measures on the loader given to begin_task, which gave no batch")
