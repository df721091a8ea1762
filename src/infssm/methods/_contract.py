"""What every continual-learning method is made of: one base, any number of regularizers, one head, one shared context.

A *base* forms the classification loss of a step (seq, er, lucir, ...). A *regularizer* adds terms that hold the new
model to the old one (ewc, lwf-ac, inf-ssm, ...). A *head* turns features into logits (linear, ncm, ...; see
``_head.py``). All are components with the same few hooks, each of which may be left out:

    begin_task -> [begin_epoch -> [loss / penalty -> after_step]* -> end_epoch]* -> end_task
"""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.geometry import StateSpace
from infssm.states import OldModel, Recorder

Terms = dict[str, Tensor]
"""Loss terms by name, weights applied; their sum is the loss."""


class ComponentConfig(BaseModel):
    """Base of every component's configuration: frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchLike(Protocol):
    """One training batch. ``x: [b, ...]`` model input, ``y: [b]`` labels in stream order, the rest optional."""

    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    @property
    def soft(self) -> Tensor | None: ...
    @property
    def raw(self) -> Tensor | None: ...


class Batch(NamedTuple):
    """A plain batch: ``soft: [b, K]`` mixed targets, ``raw: [b, ...]`` uint8 images before augmentation."""

    x: Tensor
    y: Tensor
    soft: Tensor | None = None
    raw: Tensor | None = None


Loader = Iterable[BatchLike]

ImageTransform = Callable[[Tensor, torch.Generator], Tensor]
"""From raw images ``[b, c, h, w]`` uint8 to model input ``[b, c, h', w']`` float, random numbers from the generator."""


@dataclass(frozen=True)
class TaskInfo:
    """One task of a stream: its 0-based index and the contiguous block of classes it owns."""

    index: int
    classes: range | None = None

    @classmethod
    def of(cls, task: Any) -> TaskInfo:
        """Read a task given as an int or as any object with ``index`` and ``classes``."""
        if isinstance(task, TaskInfo):
            return task
        if isinstance(task, int):
            return cls(task)
        index, classes = getattr(task, "index", None), getattr(task, "classes", None)
        if not isinstance(index, int):
            raise ConfigError(f"a task is its 0-based index or an object with .index and .classes, got {task!r}")
        return cls(index, None if classes is None else _contiguous(classes))

    @property
    def block(self) -> slice:
        """Columns of the logits that belong to this task (all of them where classes are unknown)."""
        return slice(None) if self.classes is None else slice(self.classes.start, self.classes.stop)

    @property
    def seen(self) -> slice:
        """Columns of every class met so far."""
        return slice(None) if self.classes is None else slice(0, self.classes.stop)


def _contiguous(classes: Sequence[int]) -> range:
    block = range(classes[0], classes[-1] + 1)
    if list(classes) != list(block):
        raise ConfigError(f"a task's classes must be one ascending block of stream labels, got {list(classes)}")
    return block


class StatePair(NamedTuple):
    """States of the same images in the old and the new model, one entry per layer and scan direction."""

    old: list[StateSpace]
    new: list[StateSpace]


@dataclass
class Context:
    """What the components of one method share: the module in training, the task, and the states of its forward."""

    module: nn.Module
    num_classes: int | None = None
    num_tasks: int | None = None
    task_sizes: tuple[int, ...] | None = None
    """Classes of each task, where they are known beforehand; tasks may be unequal."""
    task: TaskInfo | None = None
    recorder: Recorder | None = None
    old: OldModel | None = None
    lr: float | None = None
    """Base learning rate of the current task, where the loop knows it."""
    states_options: Mapping[str, Any] = field(default_factory=dict)
    """How states are read; the options of :class:`infssm.states.Recorder`."""
    watching: bool = False
    """A user's own loop runs the model, so recording is on for the whole task."""
    batch_size: int = 0
    """Samples of the current task in this step, on this process."""
    seed: int = 0
    """Seed of the run; what components draw at random follows from it, alike on all processes."""
    augment: ImageTransform | None = None
    """Training transform of raw images (``recipe.train``), set by the loop for methods that replay stored images."""
    normalize: Callable[[Tensor], Tensor] | None = None
    """Evaluation transform of raw images (``recipe.eval``)."""
    columns: Callable[[TaskInfo], slice] = operator.attrgetter("block")
    """Columns of the logits over which the base's softmax of a task's own images runs."""
    strong: ImageTransform | None = None
    """Strong augmentation of raw images (``StrongRecipe.train``), for contrastive terms."""
    _observed: list[StateSpace] | None = field(default=None, repr=False)
    _old_call: tuple[Tensor | Mapping[str, Any], Mapping[str, Any]] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the module's parameters."""
        return next(self.module.parameters()).device

    @property
    def layers(self) -> Any:
        """Which state space layers the method acts on."""
        return self.states_options.get("layers", "all")

    @property
    def current(self) -> TaskInfo:
        """The task in training."""
        if self.task is None:
            raise ConfigError("no task has begun: call begin_task(task) before the first step")
        return self.task

    def augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the training transform, on the module's device."""
        return self._transformed(raw, self.augment and partial(self.augment, raw, generator))

    def normalized(self, raw: Tensor) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the evaluation transform, on the module's device."""
        return self._transformed(raw, self.normalize and partial(self.normalize, raw))

    def strongly_augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the strong augmentation, on the module's device."""
        return self._transformed(raw, self.strong and partial(self.strong, raw, generator))

    def _transformed(self, raw: Tensor, transform: Callable[[], Tensor] | None) -> Tensor:
        """The transformed images; where the loop gave no transform, pixel values from 0 to 1."""
        dtype = next(self.module.parameters()).dtype
        images = raw.to(dtype) / 255 if transform is None else transform()
        return images.to(device=self.device, dtype=dtype)

    def forward(self, x: Tensor, *, stream: int | None = None, **kwargs: Any) -> Tensor:
        """Run the module on ``x: [b, ...]`` and keep its states for the regularizers of this step.

        ``stream`` is how many leading rows are images of the current task (all by default): the regularizers compare
        old and new on those. ``kwargs`` go to the module; the old model gets them too.
        """
        recorder = self.recorder if self.old is not None else None
        if recorder is None:
            return _logits(self.module(x, **kwargs))
        with contextlib.nullcontext() if self.watching else recorder.recording():
            logits = _logits(self.module(x, **kwargs))
        rows = slice(stream)
        self._observed = [space.map(lambda t: t[rows]) for space in recorder.flat()]
        recorder.clear()
        self._old_call = (x[rows], kwargs)
        return logits

    def old_forward_kwargs(self, **kwargs: Any) -> None:
        """Replace the keyword arguments with which the old model is run for the observed forward."""
        if self._old_call is not None:
            self._old_call = (self._old_call[0], kwargs)

    def observe(self, x: Tensor | Mapping[str, Any]) -> None:
        """Take the states of the forward that someone else ran on ``x``."""
        if self.old is None or self.recorder is None:
            return
        try:
            self._observed, self._old_call = self.recorder.flat(), (x, {})
        except ConfigError:
            raise ConfigError(
                "the model has run no forward since the last penalty: call penalty(x) once after each model(x)"
            ) from None
        self.recorder.clear()
        rows = self._observed[0].a.shape[0]
        if self.batch_size and rows not in (1, self.batch_size):  # states that do not depend on the input have one row
            raise ConfigError(
                f"the model's last forward had {rows} rows, the penalty is asked for {self.batch_size}: call "
                "penalty(x) right after model(x), with the same x"
            )

    def forget(self) -> None:
        """Drop the observed forward, and with it the batch and the graph it keeps alive."""
        self._observed = self._old_call = None
        if self.recorder is not None:
            self.recorder.clear()

    def states(self) -> StatePair | None:
        """Old and new states of the observed forward; ``None`` on the first task."""
        if self.old is None:
            return None
        if self._observed is None or self._old_call is None:
            raise ConfigError(
                "no forward of the model was observed since the last step; run the model before the penalty"
            )
        x, kwargs = self._old_call
        pair = StatePair(self.old.states(x, **kwargs), self._observed)
        self._observed = self._old_call = None
        return pair


def _logits(output: Any) -> Tensor:
    """Logits of a model's output: the tensor itself, or ``.logits`` of a structured output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the model must return logits or an object with .logits, got {type(output).__name__}")
    return logits


class Component:
    """Hooks shared by bases, regularizers and heads. ``Config`` holds the component's options."""

    name: ClassVar[str]
    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called before the optimiser of a task exists."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Called before each epoch."""

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Called after each epoch."""

    def after_step(self) -> None:
        """Called after each optimiser step."""

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called after the best weights of the task were restored, before its evaluation."""

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rewrite the optimiser's parameter groups."""
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Everything the component needs to go on, made of tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class Regularizer(Component, ABC):
    """Adds terms to any base's loss, from the second task on (on the first too where it has a ``prior``)."""

    needs_states: ClassVar[bool] = False
    """Whether the terms compare old and new states; the method then keeps a frozen old model."""

    family: ClassVar[str | None] = None
    """Regularizers of one family hold the same thing in variants, so a method takes one of them at most."""

    warning: ClassVar[str | None] = None
    """What a user who attaches it should know."""

    @property
    def prior(self) -> bool:
        """Whether the first task is regularized too, towards the initial model."""
        return False

    @abstractmethod
    def penalty(self, states: StatePair | None) -> Terms:
        """Loss terms of this step, weighted."""


class Base(Component, ABC):
    """Forms the classification loss. Called on every task."""

    stores_data: ClassVar[bool] = False
    """Whether images of past tasks are kept (replay)."""
    needs_raw: ClassVar[bool] = False
    """Whether batches must carry the raw images."""
    mixes: ClassVar[bool] = True
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

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the module to train: the model itself, or a wrapper with another head, prompts, ..."""
        return module

    @abstractmethod
    def loss(self, batch: BatchLike) -> Terms:
        """Loss terms of this step, weighted."""
