"""The parts of every continual-learning method: one base, any number of regularizers, one head, one shared context.

A *base* forms the classification loss of a step (seq, er, lucir, ...). A *regularizer* adds terms that hold the new
model to the old one (ewc, lwf-ac, inf-ssm, ...). A *head* turns features into logits (linear, ncm, ...; those that
are fitted begin in ``head.py``). All are components with the same few hooks, each of which may be left out:

    begin_task -> [begin_epoch -> [loss / penalty -> after_step]* -> end_epoch]* -> end_task
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from infssm._batch import Batch as Batch
from infssm._batch import model_input as model_input
from infssm.errors import ConfigError
from infssm.methods.core.context import Context as Context
from infssm.methods.core.context import ModelPair as ModelPair
from infssm.methods.core.context import Transforms as Transforms
from infssm.methods.core.tasks import BatchLike as BatchLike
from infssm.methods.core.tasks import Loader as Loader
from infssm.methods.core.tasks import TaskInfo as TaskInfo

ALL_DATA = frozenset({"images", "series", "tokens", "language", "regression"})
"""All built-in kinds of data. A kind registered by others is supported through its ``like``."""
LABELLED_DATA = ALL_DATA - {"language", "regression"}
"""Data with classes."""

Terms = dict[str, Tensor]
"""Loss terms by name, weights applied; their sum is the loss."""


class ComponentConfig(BaseModel):
    """Base of every component's configuration: frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Stateful:
    """Saves and restores the attributes named in ``saved``.

    These are tensors, plain values, dictionaries of them, random generators, or objects with a state of their own.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to continue, as tensors and plain values."""
        return {name: _copied(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in self.saved:
            own = getattr(self, name)
            if isinstance(own, torch.Generator):
                own.set_state(state[name].cpu())
            elif hasattr(own, "load_state_dict"):
                own.load_state_dict(state[name])
            else:
                setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    """The state of an attribute, which later changes of the attribute leave alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


class Component(Stateful):
    """Hooks shared by bases, regularizers and heads. ``Config`` holds the component's options."""

    name: ClassVar[str]
    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    own_first_task: ClassVar[bool] = False
    """Whether it must train the first task itself: a model that another method trained lacks what it needs."""
    needs_loader: ClassVar[bool] = False
    """Whether it measures on the task's data when the task ends: ``end_task(task, loader)``."""
    supported_data: ClassVar[frozenset[str]] = frozenset({"images"})
    """Kinds of data it works on: names of modalities; :data:`ALL_DATA` has all built-in ones."""
    supports_domains: ClassVar[bool] = True
    """Whether tasks may be new domains of the same classes."""
    online: ClassVar[bool] = False
    """Whether it works on a stream without task boundaries: nothing happens between tasks."""
    why_needs_total: ClassVar[str | None] = None
    """Why it must know all classes before the first task; None if classes may be added at any time."""

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
        """Notes for users before training with this configuration; shown by ``attach`` and ``infssm run``."""
        return []


class PairConfig(ComponentConfig):
    """Options of every regularizer that compares the old model with the new."""

    fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="part of each batch, drawn at random, on which old and new are compared; the old model runs on "
        "those rows only",
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
    needs_old: ClassVar[bool] = False
    """Whether its loss compares with the model before the task; the method then keeps a frozen old model."""
    why_no_regularizers: ClassVar[str | None] = None
    """Why no regularizer goes with it; None where they do."""
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


class Head(Component, ABC):
    """The component that turns features into logits; at most one of a method."""

    fitted: ClassVar[bool] = False
    """Whether it is computed at the end of each task, in addition to the classifier that is trained."""

    needs_old: bool = False
    """Whether it needs features of the model before the task; the method then keeps a frozen old model."""

    @classmethod
    def prepare(cls, config: Any, context: Context) -> None:
        """Put the head's classifier into ``context.module`` (trained heads); called once, before training."""

    def reset(self) -> None:
        """Discard all statistics: called at first, and before joint training presents the images of all tasks again."""

    def install(self) -> None:
        """Replace the trained classifier by the fitted module."""

    def withdraw(self) -> None:
        """Put the trained classifier back and discard the fitted module."""

    def installed_state(self) -> dict[str, dict[str, Tensor]] | None:
        """Tensors of the trained classifier, while a fitted module is installed."""
        return None

    def distances(self, features: Tensor) -> Tensor | None:  # noqa: ARG002 - of heads that measure some
        """Squared Mahalanobis distances of ``features: [b, d]`` to every class, ``[b, K]``; None without covariances.

        ``inf`` for classes without images.
        """
        return None

    def left_out_distances(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Squared distances ``[m]`` of transformed ``features: [m, d]`` to the class of each one's ``labels: [m]``.

        Each by the head as it would be without that one image, where it is fitted to it.
        """
        distances = self.distances(features)
        return None if distances is None else distances.gather(1, labels[:, None])[:, 0]

    def transformed(self, features: Tensor) -> Tensor:
        """The quantity whose statistics are taken; by default ``features: [b, d]`` themselves."""
        return features

    def moved(self, features: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002 - of heads that follow the model
        """Transformed features ``[m, d]`` of earlier images with ``labels: [m]`` where the last task moved them."""
        return features

    def restore(self, installed: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Install the fitted module of :meth:`installed_state` again."""
        if installed is not None:
            raise ConfigError(
                f"the state has a fitted head, but {self.name} is not one: build the method with the head in its name"
            )
