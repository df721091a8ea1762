"""Heads: how features ``f(x): [b, d]`` become logits ``[b, K]``.

A *trained* head is the classifier that the loss trains. A *fitted* head is computed at the end of each task from
features of the task's images, without augmentation, and stands in the classifier's place until the next task begins;
then the trained classifier is put back. What fitted heads keep are statistics, never images.

A new fitted head is one file in ``methods/heads``: a class with ``name``, ``Config``, ``Module``, ``reset``, ``add``,
``fit``, ``state_dict``, ``load_state_dict``, and ``@register_method`` above it.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from infssm._batch import model_input
from infssm.errors import ConfigError
from infssm.methods.core.context import Context
from infssm.methods.core.contract import LABELLED_DATA, Head
from infssm.methods.core.passes import evaluating, require_loader
from infssm.methods.core.tasks import Loader, TaskInfo
from infssm.methods.core.views import Views, ViewsClassifier, check_views
from infssm.models.features import Classifier, features, find_classifier
from infssm.ssm import unwrap


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
        self.old = context.old if old else None
        """The model before the task, if its features are computed too."""
        self._features = features if views is None else views

    def __iter__(self) -> Iterator[FeatureBatch]:
        device = self._context.device
        module = unwrap(self._context.module)
        with evaluating(module):
            for batch in self._loader:
                x = model_input(batch, device)
                old = None
                if self.old is not None:
                    self.old.follow()
                    old = self._features(self.old.module, x)
                yield FeatureBatch(self._features(module, x), batch.y.to(device), old)


class FittedHead(Head):
    """A head computed from features at the end of each task."""

    fitted: ClassVar[bool] = True
    needs_loader: ClassVar[bool] = True
    supported_data: ClassVar[frozenset[str]] = LABELLED_DATA
    Module: ClassVar[Callable[..., nn.Module]]
    """Builds the fitted module from its tensors: ``Module(**module.state_dict())`` is the module again."""

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self.views = Views.of(config)
        self._trained: nn.Module | None = None
        self._fitted: nn.Module | None = None
        self._loaded: Mapping[str, Tensor] | None = None
        self.reset()

    @abstractmethod
    def add(self, rows: Iterable[FeatureBatch], task: TaskInfo) -> None:
        """Add the features of the task's images to the statistics: new classes, or more images of known ones.

        Called under ``torch.no_grad``, alike on all processes.
        """

    @abstractmethod
    def fit(self) -> nn.Module:
        """The module ``Module(...)`` that follows from the statistics: ``[b, d]`` to logits ``[b, K]``.

        Called under ``torch.no_grad``. A class without images so far scores ``-inf``.
        """

    def resize(self) -> None:
        """Add classes without images if the statistics have fewer classes than the head."""

    def forget(self, label: int) -> None:
        """Remove a class from the statistics: the labels above move down by one.

        The state is then that of a head with one class less. :meth:`refit` gives this head the class back, empty.
        """
        raise ConfigError(f"{self.name} cannot forget class {label}: it has no way to remove one from its statistics")

    def leaving_out(self, features: Tensor, labels: Tensor) -> FittedHead:  # noqa: ARG002 - of heads that can
        """A head fitted to the same images without the given ones; this head itself if it cannot remove images.

        ``features: [m, d]``, transformed, with ``labels: [m]``. This head does not change. Used for calibration: a head
        scores the images that it was fitted to too well.
        """
        return self

    @property
    def classifier(self) -> Classifier:
        """The place of the classifier in the module."""
        return find_classifier(unwrap(self.context.module))

    @property
    def num_features(self) -> int:
        """Width d of the features that the head is fitted to."""
        width = getattr(self._trained, "in_features", None)  # the installed fitted module may have no in_features
        width = self.classifier.in_features if width is None else width
        return width if self.views is None else self.views.width(width)

    @property
    def num_parts(self) -> int:
        """Number of parts of the features, all of one width: one of every model and of every block."""
        return 1 if self.views is None else self.views.parts

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
        """Keep a copy of the model as it is before the first task, if that model is one of the views.

        A model that was trained elsewhere counts as the model after the first task; its earlier state is unknown.
        """
        if self.views is None or self.views.first is not None:
            return
        if self.views.config.start_model and task.index > 0:
            raise ConfigError(
                f"{self.name}: start_model is the model before the first task, and this is task {task.index}: begin "
                "with begin_task(0), or use first_model"
            )
        if self.views.config.start_model or task.index > 0:
            self.views.keep(unwrap(self.context.module))

    @torch.no_grad()
    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Fit. :meth:`install` follows later: the method first copies the old model, with its trained classifier."""
        loader = require_loader(loader, self.name, "is fitted to features of the task's images, without augmentation")
        if self.views is not None and self.views.config.first_model and task.index == 0:
            self.views.keep(unwrap(self.context.module))
        rows = Features(self.context, loader, old=self.needs_old, views=self.views)
        with torch.autocast(self.context.device.type, enabled=False):
            self.add(rows, task)
        self._fit()

    def refit(self) -> None:
        """Fit and install the module that follows from the statistics, as :meth:`end_task` did, without any images."""
        self.withdraw()
        self._fit()
        self.install()

    @torch.no_grad()
    def _fit(self) -> None:
        self.resize()
        with torch.autocast(self.context.device.type, enabled=False):
            self._fitted = self._build(self.fit().state_dict())

    def _build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The fitted module of these tensors on the model's device, in float32 or the model's wider precision."""
        like = next(self.context.module.parameters())
        module = type(self).Module(**tensors)
        module = module.to(like.device, torch.promote_types(like.dtype, torch.float32))
        module.forward = partial(_forward_without_autocast, module)
        return module.eval().requires_grad_(False)

    @property
    def fitted_module(self) -> nn.Module:
        """The module that was fitted last: features ``[b, d]`` to logits ``[b, K]``."""
        if self._fitted is None:
            raise ConfigError(f"{self.name} is not fitted yet: end a task first")
        return self._fitted

    @property
    def installed(self) -> bool:
        """Whether the fitted module stands in the classifier's place."""
        return self._trained is not None

    def install(self) -> None:
        """Replace the trained classifier by the fitted module."""
        if self._fitted is None or self.installed:
            return
        place = self.classifier
        self._trained = place.module
        if self.views is None:
            place.replace(self._fitted)
        else:
            views = ViewsClassifier(self.views, self._fitted).eval().requires_grad_(False)
            place.replace(views)
            views.install(unwrap(self.context.module))

    def withdraw(self) -> None:
        """Put the trained classifier back and discard the fitted module."""
        if self._trained is not None:
            self.classifier.replace(self._trained)
            if self.views is not None:
                ViewsClassifier.withdraw(unwrap(self.context.module))
        self._trained = self._fitted = self._loaded = None

    def installed_state(self) -> dict[str, dict[str, Tensor]] | None:
        """Tensors of the trained classifier as ``"trained"``, while a fitted module is installed; else None.

        The fitted module is computed from the statistics. Its tensors are included, as ``"fitted"``, only where it was
        loaded without statistics.
        """
        if self._trained is None:
            return None
        loaded = {} if self._loaded is None else {"fitted": dict(self._loaded)}
        return {"trained": self._trained.state_dict()} | loaded

    def restore(self, installed: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Install the fitted module of :meth:`installed_state` again.

        It is fitted to the statistics, unless its tensors are given as ``"fitted"``, as in files of weights, which have
        no statistics. The trained classifier may be one of fewer classes: the rows of the others stay as they are.
        """
        self.withdraw()
        if installed is None:
            return
        load_rows(self.classifier.module, installed["trained"])
        fitted = self._loaded = installed.get("fitted")
        if fitted is None:
            self.refit()
            return
        if self.views is not None:
            self.views.restore(unwrap(self.context.module), _without_prefix("views.first.", fitted))
            fitted = _without_prefix("fitted.", fitted)
        self._fitted = self._build(fitted)
        self.install()

    def state_dict(self) -> dict[str, Any]:
        """The first task's model, where it is one of the views."""
        first = None if self.views is None else self.views.first
        return {} if first is None else {"first": first.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self.views is not None:
            self.views.restore(unwrap(self.context.module), state.get("first"))


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


def load_rows(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a classifier of as many classes as ``module`` or fewer: rows of classes that it lacks stay as they are."""
    grown = {}
    for name, own in module.state_dict().items():
        given = tensors[name].to(own.device, own.dtype)
        grown[name] = torch.cat([given, own[len(given) :]]) if 0 < len(given) < len(own) else given
    module.load_state_dict(grown)


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
