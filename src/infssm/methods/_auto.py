"""`AutoWeight`: a regularizer's weight from the drift that unregularized training shows.

The rule: weight = TARGET / (penalty that unregularized training reaches on a new task). In a grid over distances whose
scales differ by four decades, the best weight always fell at 50 to 80 over that value.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from infssm.methods._contract import Context, Loader, StatePair, TaskInfo, _logits
from infssm.methods._losses import cross_entropy
from infssm.states import Recorder

TARGET = 60.0
_MEASURED = 5
"""Last steps of the probe over which the penalty is averaged."""


class AutoWeight:
    """Measures once, on the first task with an old model, and keeps the weight.

    With a loader a copy of the model is trained for ``steps`` steps and thrown away. Without one (a user's own loop)
    the first ``steps`` steps of the task run unregularized and are measured as they go.
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
            self._set(self._probe(task, loader))

    def weigh(self, drift: Tensor) -> Tensor:
        """The weighted penalty; 0 while still measuring."""
        if self.weight is None:
            self._seen.append(float(drift.detach()))
            if len(self._seen) >= self._steps:
                self._set(self._seen[-_MEASURED:])
            return drift * 0.0
        return self.weight * drift

    def _probe(self, task: TaskInfo, loader: Loader) -> list[float]:
        context = self._context
        assert context.old is not None
        model = copy.deepcopy(context.module).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=context.lr or 1e-3)
        recorder = Recorder(model, **context.states_options)
        values = []
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), self._steps)
        for step, batch in enumerate(batches):
            x = batch.x.to(context.device)
            with recorder.recording():
                logits = _logits(model(x))
            if step >= self._steps - _MEASURED:
                with torch.no_grad():
                    values.append(float(self._drift(StatePair(context.old.states(x), recorder.flat()))))
            cross_entropy(logits, batch, task.block).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return values

    def _set(self, values: list[float]) -> None:
        mean = torch.tensor(values, dtype=torch.float64).mean()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.weight = TARGET / max(float(mean), torch.finfo(torch.float32).tiny)

    def state_dict(self) -> dict[str, Any]:
        """The weight and the measurements so far."""
        return {"weight": self.weight, "seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.weight, self._seen = state["weight"], list(state["seen"])
