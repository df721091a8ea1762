"""transformers: its CPU Mamba layers on our scan, and any method inside its Trainer (which needs ``accelerate``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from infssm.errors import NoSSMLayersError
from infssm.integrations import _fast
from infssm.integrations._lazy import require

M = TypeVar("M", bound=nn.Module)


def accelerate(model: M) -> M:
    """Run the model's Mamba, FalconMamba, Jamba and Mamba-2 style layers on our scan and convolution, in place.

    For CPUs, where transformers loops over the tokens in Python; on other devices keep its own kernels. Outputs are
    the same (to 1e-4), in training and inference; generation steps from a cache run the original code. Packed sequences
    (``seq_idx``, ``cu_seqlens``, ``position_ids`` that restart) stay apart in layers that are told of them. States are
    then recorded by the same scan. Parameters, ``state_dict``, ``save_pretrained`` and pickling are as before;
    :func:`restore` undoes it.
    """
    swapped = 0
    for module in model.modules():
        if (fast := _fast.fast_class(type(module))) is not None:
            module.__class__ = fast
            swapped += 1
    if not swapped and not any(isinstance(module, _fast.Fast) for module in model.modules()):
        raise NoSSMLayersError(
            f"{type(model).__name__} has no transformers layer to accelerate; known: {', '.join(_fast.known())}"
        )
    return model


def restore(model: M) -> M:
    """Undo :func:`accelerate`, in place."""
    for module in model.modules():
        if isinstance(module, _fast.Fast):
            module.__class__ = module.original  # type: ignore[assignment]
    return model


@contextmanager
def accelerated(model: M) -> Iterator[M]:
    """:func:`accelerate` for the block only."""
    accelerate(model)
    try:
        yield model
    finally:
        restore(model)


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
