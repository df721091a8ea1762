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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.geometry import StateSpace
from infssm.methods._rows import count_rows, share, take_rows
from infssm.states import Observation, OldModel, OutputRecorder, Recorder, logits_of

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


class OldNew(NamedTuple):
    """The same rows in the old and in the new model."""

    old: Tensor
    new: Tensor


class StatePair(NamedTuple):
    """What old and new model give for the same rows: states, one entry per layer and scan direction.

    Beside them, where a regularizer asks for it, ``features`` and ``logits`` (``[b, ...]`` each; of language models per
    token, ``[b, tokens, ...]``). ``mask: [b, tokens]`` is the input's ``attention_mask``, if it has one.
    """

    old: list[StateSpace]
    new: list[StateSpace]
    features: OldNew | None = None
    logits: OldNew | None = None
    mask: Tensor | None = None
    order: Tensor | None = None
    """A random order of the rows, drawn where a regularizer takes a fraction of them."""
    batch_size: int = 0
    """Rows of the whole batch, of which this pair may hold a part."""

    def part(self, fraction: float) -> StatePair:
        """That share of the batch's rows, drawn at random; those of a smaller fraction are among those of a larger."""
        if self.order is None or (count := share(fraction, self.batch_size)) >= len(self.order):
            return self
        rows = self.order[:count]
        old, new = (Observation(spaces).rows(rows).states for spaces in (self.old, self.new))
        features, logits = (
            None if pair is None else OldNew(pair.old[rows], pair.new[rows]) for pair in (self.features, self.logits)
        )
        return StatePair(old, new, features, logits, None if self.mask is None else self.mask[rows])


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
    outputs: OutputRecorder | None = None
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
    generator: torch.Generator = field(init=False, repr=False)
    """Draws the rows of regularizers that take a fraction of each batch."""
    _observed: Observation | None = field(default=None, repr=False)
    _old_call: tuple[Tensor | Mapping[str, Any], Mapping[str, Any]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Away from the seeds of replay buffers, whose draws would otherwise go along with these.
        self.generator = torch.Generator().manual_seed(2**32 + self.seed)

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
        """Run the module on ``x: [b, ...]`` and keep what the regularizers of this step ask for.

        ``stream`` is how many leading rows are images of the current task (all by default): the regularizers compare
        old and new on those. ``kwargs`` go to the module; the old model gets them too.
        """
        if not self._observes:
            return logits_of(self.module(x, **kwargs))
        with contextlib.nullcontext() if self.watching else self.recording():
            logits = logits_of(self.module(x, **kwargs))
            rows = slice(stream)
            self._observed = self._taken().rows(rows)
        self._old_call = (x[rows], kwargs)
        return logits

    @property
    def _observes(self) -> bool:
        """Whether forwards are compared with an old model's."""
        return self.old is not None and (self.recorder is not None or self.outputs is not None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the regularizers ask for in the forwards of the block."""
        with contextlib.ExitStack() as stack:
            for recorder in (self.recorder, self.outputs):
                if recorder is not None:
                    stack.enter_context(recorder.recording())
            yield

    def _taken(self) -> Observation:
        """What was recorded of the last forward, which is forgotten."""
        states = [] if self.recorder is None else self.recorder.flat()
        outputs = {} if self.outputs is None else self.outputs.taken()
        self._clear()
        return Observation(states, **outputs)

    def _clear(self) -> None:
        for recorder in (self.recorder, self.outputs):
            if recorder is not None:
                recorder.clear()

    def old_forward_kwargs(self, **kwargs: Any) -> None:
        """Replace the keyword arguments with which the old model is run for the observed forward."""
        if self._old_call is not None:
            self._old_call = (self._old_call[0], kwargs)

    def observe(self, x: Tensor | Mapping[str, Any]) -> None:
        """Take what was recorded of the forward that someone else ran on ``x``."""
        if not self._observes:
            return
        try:
            self._observed, self._old_call = self._taken(), (x, {})
        except ConfigError:
            raise ConfigError(
                "the model has run no forward since the last penalty: call penalty(x) once after each model(x)"
            ) from None
        rows = self._observed.batch_size
        if self.batch_size and rows not in (1, self.batch_size):  # states that do not depend on the input have one row
            raise ConfigError(
                f"the model's last forward had {rows} rows, the penalty is asked for {self.batch_size}: call "
                "penalty(x) right after model(x), with the same x"
            )

    def forget(self) -> None:
        """Drop the observed forward, and with it the batch and the graph it keeps alive."""
        self._observed = self._old_call = None
        self._clear()

    def states(self, fractions: Collection[float] = (1.0,)) -> StatePair | None:
        """What old and new model give for the observed forward, in one forward of the old; ``None`` on the first task.

        Where all ``fractions`` are below 1 the old model runs on the rows of the largest alone.
        """
        if self.old is None:
            return None
        if self._observed is None or self._old_call is None:
            raise ConfigError(
                "no forward of the model was observed since the last step; run the model before the penalty"
            )
        new, (x, kwargs), order = self._observed, self._old_call, None
        self._observed = self._old_call = None
        count = count_rows(x)
        if min(fractions) < 1:
            order = torch.randperm(count, generator=self.generator).to(self.device)
        if order is not None and (part := share(max(fractions), count)) < count:
            rows, order = order[:part], torch.arange(part, device=self.device)
            new, kwargs = new.rows(rows), take_rows(kwargs, rows, count)
            x = x[rows] if isinstance(x, Tensor) else take_rows(x, rows, count)
        asked = {"features": new.features is not None, "logits": new.logits is not None}
        old = self.old.observe(x, states=self.recorder is not None, **asked, **kwargs)
        mask = x.get("attention_mask") if isinstance(x, Mapping) else None
        features, logits = _old_new(old.features, new.features), _old_new(old.logits, new.logits)
        return StatePair(old.states, new.states, features, logits, mask, order, count)


def _old_new(old: Tensor | None, new: Tensor | None) -> OldNew | None:
    return None if old is None or new is None else OldNew(old, new)


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
    """Adds terms to any base's loss, from the second task on (on the first too where it has a ``prior``)."""

    needs_states: ClassVar[bool] = False
    """Whether the terms compare old and new states; the method then keeps a frozen old model."""
    needs_features: ClassVar[bool] = False
    """Whether they compare old and new features, likewise."""
    needs_logits: ClassVar[bool] = False
    """Whether they compare old and new logits, likewise."""

    family: ClassVar[str | None] = None
    """Regularizers of one family hold the same thing in variants, so a method takes one of them at most."""

    warning: ClassVar[str | None] = None
    """What a user who attaches it should know."""

    @property
    def compares(self) -> bool:
        """Whether the terms compare the old model with the new."""
        return self.needs_states or self.needs_features or self.needs_logits

    @property
    def fraction(self) -> float:
        """Part of each batch on which they are compared."""
        return self.config.fraction if isinstance(self.config, PairConfig) else 1.0

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
