"""transformers: its CPU Mamba layers on our scan, and any method inside its Trainer (which needs ``accelerate``)."""

from __future__ import annotations

from typing import Any

from infssm._optional import require
from infssm.ssm.accelerate import accelerate, accelerated, restore


class ContinualTrainerMixin:
    """Adds a method's penalty to a Trainer's loss: ``class MyTrainer(ContinualTrainerMixin, Trainer)``.

    ``MyTrainer(model=model, method=infssm.attach(model, name), ...)``; then one :meth:`train_task` per task.
    """

    def __init__(self, *args: Any, method: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.method = method
        self.add_callback(_step_callback(method))  # type: ignore[attr-defined]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss, plus the penalty of the same forward while training."""
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            penalty = self.method.penalty(inputs)
            loss = loss + (penalty / self._accumulation() if self._is_scaled(num_items_in_batch) else penalty)
        return (loss, outputs) if return_outputs else loss

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is normalised over all accumulated batches already, so that the Trainer leaves it alone."""
        if (said := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(said)
        by_model = getattr(self, "model_accepts_loss_kwargs", False) and num_items_in_batch is not None
        return by_model or getattr(self, "compute_loss_func", None) is not None

    def _accumulation(self) -> int:
        steps: int = self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        return steps

    def train_task(self, task: Any, train_dataset: Any = None, **kwargs: Any) -> Any:
        """Train one task: an int, or an object with ``index`` and ``classes``; returns what ``train`` returns."""
        if train_dataset is not None:
            self.train_dataset = train_dataset
        self.method.begin_task(task)
        result = self.train(**kwargs)  # type: ignore[attr-defined]
        self.method.end_task(task)
        return result


def _step_callback(method: Any) -> Any:
    library = require("transformers.trainer_callback", install="pip install 'infssm[hf]'")

    class AfterStep(library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Tells the method of every optimizer step."""

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Called after the step, before the gradients are zeroed."""
            method.after_step()

    return AfterStep()


__all__ = ["ContinualTrainerMixin", "accelerate", "accelerated", "restore"]
