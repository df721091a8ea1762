"""Any method as a Lightning callback. Lightning is not a dependency; with Lightning Fabric no adapter is needed."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from infssm._optional import require

library = require("lightning.pytorch", "pytorch_lightning", install="pip install lightning")


class ContinualCallback(library.Callback):  # type: ignore[misc, name-defined]
    """Makes each ``trainer.fit`` one task: ``Trainer(callbacks=[ContinualCallback(method)])``.

    ``method`` comes from ``infssm.attach(model, name)``. ``task`` is the first task's index; it grows by one with
    every fit. ``inputs`` selects the model's input from a batch (the first element by default).
    """

    def __init__(self, method: Any, *, task: int = 0, inputs: Callable[[Any], Any] = itemgetter(0)) -> None:
        super().__init__()
        self.method, self.task, self.inputs = method, task, inputs
        self._x: Any = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Begin the task."""
        self._steps = trainer.global_step
        self.method.begin_task(self.task)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Keep the model's input for the penalty."""
        self._x = self.inputs(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:  # noqa: ARG002
        """Add the penalty to the loss in place, because the trainer keeps this tensor."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches
        loss.add_(scale * self.method.penalty(self._x).to(loss.dtype))

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Notify the method of the optimizer step, if this batch made one."""
        self._x = None
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.method.after_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the task; the next fit is the next one."""
        self.method.end_task(self.task)
        self.task += 1

    def state_dict(self) -> dict[str, Any]:
        """The task's index and the method's state, for the trainer's checkpoint."""
        return {"task": self.task, "method": self.method.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.task = state_dict["task"]
        self.method.load_state_dict(state_dict["method"])
