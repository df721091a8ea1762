"""What every continual-learning method is made of: one base, any number of regularizers, one head, one shared context.

A *base* forms the classification loss of a step (seq, er, lucir, ...). A *regularizer* adds terms that hold the new
model to the old one (ewc, lwf-ac, inf-ssm, ...). A *head* turns features into logits (linear, ncm, ...; see
``head.py``). All are components with the same few hooks, each of which may be left out:

    begin_task -> [begin_epoch -> [loss / penalty -> after_step]* -> end_epoch]* -> end_task
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from infssm._batch import Batch
from infssm.methods.core.context import Context, ModelPair, Transforms
from infssm.methods.core.tasks import BatchLike, Loader, TaskInfo, model_input

__all__ = [
    "ALL_DATA",
    "LABELLED_DATA",
    "Base",
    "Batch",
    "BatchLike",
    "Component",
    "ComponentConfig",
    "Context",
    "Loader",
    "ModelPair",
    "PairConfig",
    "Regularizer",
    "TaskInfo",
    "Terms",
    "Transforms",
    "model_input",
]

ALL_DATA = frozenset({"images", "series", "tokens", "language", "regression"})
"""All kinds of data."""
LABELLED_DATA = ALL_DATA - {"language", "regression"}
"""Data with classes."""

Terms = dict[str, Tensor]
"""Loss terms by name, weights applied; their sum is the loss."""


class ComponentConfig(BaseModel):
    """Base of every component's configuration: frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Component:
    """Hooks shared by bases, regularizers and heads. ``Config`` holds the component's options."""

    name: ClassVar[str]
    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    own_first_task: ClassVar[bool] = False
    """Whether it must train the first task itself: a model that another method trained lacks what it needs."""
    needs_loader: ClassVar[bool] = False
    """Whether it measures on the task's data when the task ends: ``end_task(task, loader)``."""
    supported_data: ClassVar[frozenset[str]] = frozenset({"images"})
    """Kinds of data it works on: names of modalities; :data:`ALL_DATA` is all of them."""
    supports_domains: ClassVar[bool] = True
    """Whether tasks may be new domains of the same classes."""
    online: ClassVar[bool] = False
    """Whether it works on a stream whose boundaries between tasks are not told: nothing happens where tasks meet."""
    needs_total: ClassVar[str | None] = None
    """Why it must know all classes before the first task; None where classes may be added at any time."""

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called before the optimizer of a task exists."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Called before each epoch."""

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Called after each epoch."""

    def after_step(self) -> None:
        """Called after each optimizer step."""

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called after the best weights of the task were restored, before its evaluation."""

    def forget(self, label: int) -> None:
        """Remove a class from what the component keeps; labels above move down by one. Weights stay as they are."""

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rewrite the optimizer's parameter groups."""
        return groups

    def automatic_options(self) -> dict[str, float]:
        """Options whose value the component measured itself, to be shown when a task ends."""
        return {}

    def warnings(self) -> list[str]:
        """What a user should know before training with this configuration; shown by ``attach`` and ``infssm run``."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Everything the component needs to go on, made of tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class PairConfig(ComponentConfig):
    """Options of every regularizer that compares the old model with the new."""

    fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="part of each batch, drawn at random, on which old and new are compared; the old model runs on "
        "those rows alone",
    )


class Regularizer(Component, ABC):
    """Adds terms to any base's loss, from the second task on (on the first too where it ``acts_on_first_task``)."""

    needs_states: ClassVar[bool] = False
    """Whether the terms compare old and new states; the method then keeps a frozen old model."""
    needs_features: ClassVar[bool] = False
    """Whether they compare old and new features, likewise."""
    needs_logits: ClassVar[bool] = False
    """Whether they compare old and new logits, likewise."""

    family: ClassVar[str | None] = None
    """Regularizers of one family hold the same thing in variants, so a method has one of them at most."""

    acts_on_first_task: bool = False
    """Whether the first task is regularized too, towards the initial model."""

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self.compares = self.needs_states or self.needs_features or self.needs_logits
        """Whether the terms compare the old model with the new."""
        self.fraction: float = config.fraction if isinstance(config, PairConfig) else 1.0
        """Part of each batch on which they are compared."""

    @abstractmethod
    def penalty(self, pair: ModelPair) -> Terms:
        """Loss terms of this step, weighted. ``pair`` has what the regularizer ``needs`` of both models."""


class Base(Component, ABC):
    """Forms the classification loss. Called on every task."""

    stores_data: ClassVar[bool] = False
    """Whether images of past tasks are kept (replay)."""
    needs_raw: ClassVar[bool] = False
    """Whether batches must carry the raw images."""
    supports_soft_labels: ClassVar[bool] = True
    """Whether mixup and label smoothing may be applied to its batches."""
    joint: ClassVar[bool] = False
    """Whether every task's data includes all earlier tasks' (upper bound)."""
    freezes: ClassVar[bool] = False
    """Whether the features stay as they are after the first task."""
    own_classifier: ClassVar[bool] = False
    """Whether :meth:`prepare` replaces the classifier that is trained, so that no other trained head fits."""

    def columns(self, task: TaskInfo) -> slice:
        """Columns of the logits over which the softmax of the task's own images runs."""
        return task.block

    @classmethod
    def prepare(cls, config: Any, context: Context) -> nn.Module:  # noqa: ARG003
        """Return the module to train: the model, ``context.module``, or a wrapper with prompts, an encoder, ..."""
        return context.module

    @abstractmethod
    def loss(self, batch: BatchLike) -> Terms:
        """Loss terms of this step, weighted."""
