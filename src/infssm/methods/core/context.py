"""What the components of one method share.

:class:`Context` holds what does not change from the method's building on; :class:`Progress` where training stands,
which the method alone writes; :class:`Observed` what one forward of the module showed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.rows import Input, count_rows, first_rows, share, take_rows
from infssm.methods.core.tasks import TaskInfo
from infssm.ssm import Observation, OldModel, OutputRecorder, Recorder, StateSpace, logits_of

ImageTransform = Callable[[Tensor, torch.Generator], Tensor]
"""From raw images ``[b, c, h, w]`` uint8 to model input ``[b, c, h', w']`` float, random numbers from the generator."""


@dataclass(frozen=True)
class Transforms:
    """How stored raw images become model input again; where one is missing, pixel values from 0 to 1."""

    train: ImageTransform | None = None
    """Training transform (``recipe.train``)."""
    evaluation: Callable[[Tensor], Tensor] | None = None
    """Evaluation transform (``recipe.eval``)."""
    strong: ImageTransform | None = None
    """Strong augmentation (``StrongRecipe.train``), for contrastive terms."""


class OldNew(NamedTuple):
    """The same rows in the old and in the new model."""

    old: Tensor
    new: Tensor


class StatePair(NamedTuple):
    """What old and new model give for the same rows: states, one entry per layer and scan direction.

    Beside them, where a regularizer asks for it, ``features`` and ``logits`` (``[b, ...]`` each; of language models per
    token, ``[b, tokens, ...]``). ``mask: [b, tokens]`` is the input's ``attention_mask`` or ``mask``, if it has
    one.
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

    def subset(self, fraction: float) -> StatePair:
        """That share of the batch's rows, drawn at random; those of a smaller fraction are among those of a larger."""
        if self.order is None or (count := share(fraction, self.batch_size)) >= len(self.order):
            return self
        rows = self.order[:count]
        old, new = (Observation(spaces).rows(rows).states for spaces in (self.old, self.new))
        features, logits = (
            None if pair is None else OldNew(pair.old[rows], pair.new[rows]) for pair in (self.features, self.logits)
        )
        return StatePair(old, new, features, logits, None if self.mask is None else self.mask[rows])


class Observed(NamedTuple):
    """What one forward showed of the new model, and the call that shows it of the old one."""

    new: Observation
    x: Tensor | Mapping[str, Any]
    kwargs: Mapping[str, Any]


@dataclass
class Progress:
    """Where training stands. Written by :class:`Method`, read by everyone."""

    task: TaskInfo | None = None
    lr: float | None = None
    """Base learning rate of the task, where the loop knows it."""
    old: OldModel | None = None
    batch_size: int = 0
    """Samples of the current task in this step, on this process."""
    observed: Observed | None = None
    generator: torch.Generator = field(default_factory=torch.Generator, repr=False)
    """Draws the rows of regularizers that take a fraction of each batch."""


@dataclass(frozen=True)
class Context:
    """What the components of one method share; all of it is known when the method is built, but its ``progress``."""

    module: nn.Module
    num_classes: int | None = None
    num_tasks: int | None = None
    task_sizes: tuple[int, ...] | None = None
    """Classes of each task, where they are known beforehand; tasks may be unequal."""
    data_kind: str = "images"
    """What the samples are: ``images``, ``series``, ``tokens`` (with classes) or ``language``."""
    seed: int = 0
    """Seed of the run; what components draw at random follows from it, alike on all processes."""
    transforms: Transforms = Transforms()
    states_options: Mapping[str, Any] = field(default_factory=dict)
    """How states are read; the options of :class:`infssm.ssm.Recorder`."""
    recorder: Recorder | None = None
    """Reads the module's states, where a regularizer compares them."""
    outputs: OutputRecorder | None = None
    """Reads its features and logits, likewise."""
    own_loop: bool = False
    """A user's own loop runs the model, so recording is on for the whole task."""
    columns: Callable[[TaskInfo], slice] = operator.attrgetter("block")
    """Columns of the logits over which the base's softmax of a task's own images runs."""
    progress: Progress = field(default_factory=Progress)

    @property
    def device(self) -> torch.device:
        """Device of the module's parameters."""
        return next(self.module.parameters()).device

    @property
    def layers(self) -> Any:
        """Which state space layers the method acts on."""
        return self.states_options.get("layers", "all")

    @property
    def task(self) -> TaskInfo | None:
        """The task in training, or the last one; ``None`` before the first."""
        return self.progress.task

    @property
    def current(self) -> TaskInfo:
        """The task in training."""
        if self.task is None:
            raise ConfigError("no task has begun: call begin_task(task) before the first step")
        return self.task

    @property
    def old(self) -> OldModel | None:
        """The frozen model of the end of the last task."""
        return self.progress.old

    @property
    def generator(self) -> torch.Generator:
        """Draws the rows of regularizers that take a fraction of each batch."""
        return self.progress.generator

    def augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the training transform, on the module's device."""
        train = self.transforms.train
        return self._transformed(raw, train and partial(train, raw, generator))

    def normalized(self, raw: Tensor) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the evaluation transform, on the module's device."""
        evaluation = self.transforms.evaluation
        return self._transformed(raw, evaluation and partial(evaluation, raw))

    def strongly_augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the strong augmentation, on the module's device."""
        strong = self.transforms.strong
        return self._transformed(raw, strong and partial(strong, raw, generator))

    def _transformed(self, raw: Tensor, transform: Callable[[], Tensor] | None) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        images = raw.to(dtype) / 255 if transform is None else transform()
        return images.to(device=self.device, dtype=dtype)

    def forward(self, x: Input, *, current_rows: int | None = None, **kwargs: Any) -> Tensor:
        """Run the module on ``x: [b, ...]`` and keep what the regularizers of this step ask for.

        A mapping of keyword arguments stands for ``module(**x)``. ``current_rows`` is how many leading rows are images
        of the current task (all by default): the regularizers compare old and new on those. ``kwargs`` go to the
        module; the old model gets them too.
        """
        if not self._observes:
            return self._run(x, kwargs)
        with contextlib.nullcontext() if self.own_loop else self.recording():
            logits = self._run(x, kwargs)
            rows = slice(current_rows)
            self.progress.observed = Observed(self._taken().rows(rows), first_rows(x, current_rows), kwargs)
        return logits

    def _run(self, x: Input, kwargs: Mapping[str, Any]) -> Tensor:
        return logits_of(self.module(**x, **kwargs) if isinstance(x, Mapping) else self.module(x, **kwargs))

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
        if self.progress.observed is not None:
            self.progress.observed = self.progress.observed._replace(kwargs=kwargs)

    def observe(self, x: Tensor | Mapping[str, Any]) -> None:
        """Take what was recorded of the forward that someone else ran on ``x``."""
        if not self._observes:
            return
        try:
            observed = Observed(self._taken(), x, {})
        except ConfigError:
            raise ConfigError(
                "the model has run no forward since the last penalty: call penalty(x) once after each model(x)"
            ) from None
        self.progress.observed = observed
        recorders = (recorder for recorder in (self.recorder, self.outputs) if recorder is not None)
        if torch.is_grad_enabled() and not all(recorder.with_gradient for recorder in recorders):
            raise ConfigError(
                "the model's last forward ran under torch.no_grad(), so the penalty would have no gradient: call "
                "penalty(x) right after model(x), before any forward under no_grad (to measure the penalty without "
                "training, call penalty(x) under no_grad, too)"
            )
        rows, asked = observed.new.batch_size, self.progress.batch_size
        if asked and rows not in (1, asked):  # states that do not depend on the input have one row
            raise ConfigError(
                f"the model's last forward had {rows} rows, the penalty is asked for {asked}: call penalty(x) right "
                "after model(x), with the same x"
            )

    def forget(self) -> None:
        """Drop the observed forward, and with it the batch and the graph it keeps alive."""
        self.progress.observed = None
        self._clear()

    def states(self, fractions: Collection[float] = (1.0,)) -> StatePair | None:
        """What old and new model give for the observed forward, in one forward of the old; ``None`` on the first task.

        Where all ``fractions`` are below 1 the old model runs on the rows of the largest alone.
        """
        if self.old is None:
            return None
        observed, self.progress.observed = self.progress.observed, None
        if observed is None:
            raise ConfigError(
                "no forward of the model was observed since the last step; run the model before the penalty"
            )
        (new, x, kwargs), order = observed, None
        count = count_rows(x)
        if min(fractions) < 1:
            order = torch.randperm(count, generator=self.generator).to(self.device)
        if order is not None and (most := share(max(fractions), count)) < count:
            rows, order = order[:most], torch.arange(most, device=self.device)
            new, kwargs = new.rows(rows), take_rows(kwargs, rows, count)
            x = x[rows] if isinstance(x, Tensor) else take_rows(x, rows, count)
        asked = {"features": new.features is not None, "logits": new.logits is not None}
        old = self.old.observe(x, states=self.recorder is not None, **asked, **kwargs)
        mask = x.get("attention_mask", x.get("mask")) if isinstance(x, Mapping) else None
        features, logits = _old_new(old.features, new.features), _old_new(old.logits, new.logits)
        return StatePair(old.states, new.states, features, logits, mask, order, count)


def _old_new(old: Tensor | None, new: Tensor | None) -> OldNew | None:
    return None if old is None or new is None else OldNew(old, new)
