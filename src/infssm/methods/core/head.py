"""Heads: how features ``f(x): [b, d]`` become logits ``[b, K]``.

A *trained* head is the classifier that the loss trains. A *fitted* head is computed at the end of each task from
features of the task's images, without augmentation, and stands in the classifier's place until the next task begins;
then the trained classifier is put back. What fitted heads keep are statistics, never images.

A new fitted head is one file in ``methods/heads``: a class with ``name``, ``Config``, ``Module``, ``reset``, ``fit``,
``state_dict``, ``load_state_dict``, and ``@register_method`` above it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.context import Context
from infssm.methods.core.contract import LABELLED_DATA, Component
from infssm.methods.core.passes import evaluating, require_loader
from infssm.methods.core.tasks import Loader, TaskInfo, model_input
from infssm.methods.core.views import Views, ViewsClassifier, check_views
from infssm.models.features import Classifier, features, find_classifier
from infssm.ssm import unwrap


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
        """Put the fitted module in the place of the trained classifier."""

    def withdraw(self) -> None:
        """Put the trained classifier back."""

    def installed_state(self) -> dict[str, dict[str, Tensor]] | None:
        """Tensors of the fitted module and of the trained classifier, while the fitted one is installed."""
        return None

    def restore(self, installed: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Install the fitted module of :meth:`installed_state` again."""
        if installed is not None:
            raise ConfigError(
                f"the state has a fitted head, and {self.name} is none: build the method by its full name"
            )


class FeatureBatch(NamedTuple):
    """Features of some images: ``new: [b, d]`` of the model now, ``old: [b, d]`` of the model before the task.

    ``y: [b]`` labels. ``old`` is ``None`` on the first task and where the head does not need it.
    """

    new: Tensor
    y: Tensor
    old: Tensor | None


class Features:
    """Features of a task's images, batch by batch, on the module's device; iterating again runs the models again.

    Under several processes each has its share of the images, some maybe none: add up with ``sum_over_processes``.
    """

    def __init__(self, context: Context, loader: Loader, *, old: bool, views: Views | None = None) -> None:
        self._context = context
        self._loader = loader
        self._old = context.old if old else None
        self._features = features if views is None else views

    def __iter__(self) -> Iterator[FeatureBatch]:
        device = self._context.device
        module = unwrap(self._context.module)
        with evaluating(module):
            for batch in self._loader:
                x: Any = model_input(batch)
                x = x.to(device) if isinstance(x, Tensor) else {key: value.to(device) for key, value in x.items()}
                old = None
                if self._old is not None:
                    self._old.follow()
                    old = self._features(self._old.module, x)
                yield FeatureBatch(self._features(module, x), batch.y.to(device), old)


class FittedHead(Head):
    """A head computed from features at the end of each task."""

    fitted: ClassVar[bool] = True
    needs_loader: ClassVar[bool] = True
    supported_data: ClassVar[frozenset[str]] = LABELLED_DATA
    supports_domains: ClassVar[bool] = False
    Module: ClassVar[Callable[..., nn.Module]]
    """Builds the fitted module from its tensors: ``Module(**module.state_dict())`` is the module again."""

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self._views = Views.of(config)
        self._trained: nn.Module | None = None
        self._fitted: nn.Module | None = None
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Discard all statistics: called at first, and before joint training presents the images of all tasks again."""

    @abstractmethod
    def fit(self, rows: Features, task: TaskInfo) -> nn.Module:
        """Add the features of the task's images and return ``Module(...)``: ``[b, d]`` to logits ``[b, K]``.

        Called under ``torch.no_grad``, alike on all processes. A class without images so far scores ``-inf``.
        """

    @property
    def classifier(self) -> Classifier:
        """The place of the classifier in the module."""
        return find_classifier(unwrap(self.context.module))

    @property
    def num_features(self) -> int:
        """Width d of the features that it is fitted to."""
        width = self.classifier.in_features
        return width if self._views is None else self._views.width(width)

    @property
    def num_models(self) -> int:
        """Number of models the features are from; each gives an equal part of them."""
        return 1 if self._views is None else self._views.models

    @property
    def num_classes(self) -> int:
        """Number K of classes."""
        return class_count(self.context, self.classifier, self.name)

    @classmethod
    def prepare(cls, config: Any, context: Context) -> None:
        """Nothing is replaced before the first fit; a model without a classifier is refused now."""
        find_classifier(unwrap(context.module))
        check_views(config, context, cls.name)

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """A model that was trained elsewhere is the first task's."""
        if self._views is not None and self._views.first is None and task.index > 0:
            self._views.keep(unwrap(self.context.module))

    @torch.no_grad()
    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Fit; the method installs what was fitted once the old model is copied."""
        loader = require_loader(loader, self.name, "is fitted to features of the task's images, without augmentation")
        if self._views is not None and task.index == 0:
            self._views.keep(unwrap(self.context.module))
        rows = Features(self.context, loader, old=self.needs_old, views=self._views)
        with torch.autocast(self.context.device.type, enabled=False):
            self._fitted = self._build(self.fit(rows, task).state_dict())

    def _build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The fitted module of these tensors on the model's device, in float32 or the model's wider precision."""
        like = next(self.context.module.parameters())
        module = type(self).Module(**tensors)
        module = module.to(like.device, torch.promote_types(like.dtype, torch.float32))
        module.forward = partial(_forward_without_autocast, module)
        module = module if self._views is None else ViewsClassifier(self._views, module)
        return module.eval().requires_grad_(False)

    @property
    def installed(self) -> bool:
        """Whether the fitted module stands in the classifier's place."""
        return self._trained is not None

    def install(self) -> None:
        """Put the fitted module in the place of the trained classifier."""
        if self._fitted is None or self.installed:
            return
        place = self.classifier
        self._trained = place.module
        place.replace(self._fitted)
        if isinstance(self._fitted, ViewsClassifier):
            self._fitted.install(unwrap(self.context.module))

    def withdraw(self) -> None:
        """Put the trained classifier back."""
        if self._trained is not None:
            self.classifier.replace(self._trained)
            if isinstance(self._fitted, ViewsClassifier):
                self._fitted.withdraw(unwrap(self.context.module))
        self._trained = self._fitted = None

    def installed_state(self) -> dict[str, dict[str, Tensor]] | None:
        """Tensors of the fitted module and of the trained classifier, while the fitted one is installed."""
        if self._trained is None or self._fitted is None:
            return None
        return {"fitted": self._fitted.state_dict(), "trained": self._trained.state_dict()}

    def restore(self, installed: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Install the fitted module of :meth:`installed_state` again."""
        self.withdraw()
        if installed is None:
            return
        self.classifier.module.load_state_dict(installed["trained"])
        fitted = installed["fitted"]
        if self._views is not None:
            self._views.restore(unwrap(self.context.module), _without_prefix("views.first.", fitted))
            fitted = _without_prefix("fitted.", fitted)
        self._fitted = self._build(fitted)
        self.install()

    def state_dict(self) -> dict[str, Any]:
        """The first task's model, where it is one of the views."""
        first = None if self._views is None else self._views.first
        return {} if first is None else {"first": first.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self._views is not None:
            self._views.restore(unwrap(self.context.module), state.get("first"))


def _forward_without_autocast(module: nn.Module, features: Tensor) -> Tensor:
    """The forward of a fitted ``module`` in the precision of its own tensors, also inside an autocast region.

    Scores are differences of large numbers: rounded to bfloat16, LDA lost 2.3 points of accuracy on digits. Bound to
    the instance rather than wrapped around it, so that the tensors keep the names of a plain layer in saved files.
    """
    own = next(itertools.chain(module.parameters(), module.buffers()), features)
    with torch.autocast(features.device.type, enabled=False):
        scores: Tensor = type(module).forward(module, features.to(own.dtype))
    return scores


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, which is removed."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def class_count(context: Context, place: Classifier, head: str) -> int:
    """Number of classes a head scores: the stream's, else as many as the model's own classifier has."""
    count = context.num_classes or getattr(place.module, "out_features", None)
    if not isinstance(count, int):
        raise ConfigError(f"{head} scores every class: give num_classes")
    return count


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """``nn.Linear`` with these ``weight: [K, d]`` and ``bias: [K]``: the ``Module`` of heads that are linear."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer
