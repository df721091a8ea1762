"""The context that the components of one method share, and the comparison of old and new model."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infssm._batch import run_model
from infssm._modality import IMAGES, Modality
from infssm.errors import ConfigError
from infssm.methods.core.tasks import Input, TaskInfo
from infssm.ssm import Observation, OldModel, Recorder, logits_of

ImageTransform = Callable[[Tensor, torch.Generator], Tensor]
"""Maps raw images ``[b, c, h, w]`` uint8 to model input ``[b, c, h', w']`` float, random numbers from the generator."""


@dataclass(frozen=True)
class Transforms:
    """How stored raw images become model input again; where one is missing, pixel values from 0 to 1."""

    train: ImageTransform | None = None
    """Training transform (``recipe.train``)."""
    evaluation: Callable[[Tensor], Tensor] | None = None
    """Evaluation transform (``recipe.eval``)."""
    strong: ImageTransform | None = None
    """Strong augmentation (``StrongRecipe.train``), for contrastive terms."""


class ModelPair(NamedTuple):
    """Outputs of the old and the new model for the same rows, as far as the regularizers need them.

    Each has ``states``, one entry per layer and scan direction, ``features`` and ``logits``, ``[b, ...]`` (of language
    models per token, ``[b, tokens, ...]``). ``mask: [b, tokens]`` is the input's ``attention_mask`` or ``mask``, if it
    has one.
    """

    old: Observation
    new: Observation
    mask: Tensor | None = None
    order: Tensor | None = None
    """A random order of the rows, drawn where a regularizer compares a fraction of them."""
    batch_size: int = 0
    """Number of rows of the whole batch; this pair may hold only some of them."""

    def subset(self, fraction: float) -> ModelPair:
        """A fraction of the batch's rows, drawn at random; a smaller fraction's are among those of a larger one."""
        if self.order is None or (count := num_rows(fraction, self.batch_size)) >= len(self.order):
            return self
        rows = self.order[:count]
        return ModelPair(self.old.rows(rows), self.new.rows(rows), None if self.mask is None else self.mask[rows])


NOTHING = ModelPair(Observation([]), Observation([]))
"""The input of a regularizer that compares neither states, nor features, nor logits."""


class _Observed(NamedTuple):
    """The records of one forward of the new model, and the call that repeats it with the old model."""

    new: Observation
    x: Input
    kwargs: Mapping[str, Any]
    known: Tensor | None = None
    """The old model's logits, if they are known and nothing else is compared."""


class Context:
    """The shared state of the components of one method: the module, the stream, and the progress of training.

    What is known of the stream is fixed when the method is built. ``task``, ``old`` and ``batch_size`` say where
    training stands: components read them, and only the methods of this class write them.

    Args:
        module: the model; once the base has prepared it, the module to train.
        num_classes: number of classes of the whole stream, if known.
        num_tasks: number of tasks of the stream, if known.
        task_sizes: classes of each task, if they are known beforehand; tasks may be unequal.
        modality: the kind of data that the samples are.
        seed: of the run; what components draw at random follows from it, alike on all processes.
        transforms: map stored raw images to model input.
        states_options: how states are read; the options of :class:`infssm.ssm.Recorder`.
        own_loop: a user's own loop runs the model, so recording is on for the whole task.
    """

    columns: Callable[[TaskInfo], slice] = operator.attrgetter("block")
    """Columns of the logits over which the base's softmax of a task's own samples runs."""
    task: TaskInfo | None = None
    """The task in training, or the last one; None before the first."""
    old: OldModel | None = None
    """The frozen model of the end of the last task, if a component asks for one."""
    batch_size: int = 0
    """Samples of the current task in this step, on this process."""
    supply: Callable[[], tuple[Input, Tensor | None]] | None = None
    """Model input on which old and new are compared in every step, if a component makes it, else the step's own;
    and the old model's logits on it, if they are known and nothing else is compared."""

    def __init__(
        self,
        module: nn.Module,
        *,
        num_classes: int | None = None,
        num_tasks: int | None = None,
        task_sizes: tuple[int, ...] | None = None,
        modality: Modality = IMAGES,
        seed: int = 0,
        transforms: Transforms | None = None,
        states_options: Mapping[str, Any] | None = None,
        own_loop: bool = False,
    ) -> None:
        self.module = module
        self.num_classes, self.num_tasks, self.task_sizes = num_classes, num_tasks, task_sizes
        self.modality, self.seed, self.own_loop = modality, seed, own_loop
        self.transforms = transforms or Transforms()
        self.states_options = states_options or {}
        # Away from the seeds of replay buffers, whose draws would otherwise be correlated with these.
        self.generator = torch.Generator().manual_seed(2**32 + seed)
        """Draws the rows of regularizers that compare a fraction of each batch."""
        self._recorder: Recorder | None = None
        self.compares_logits_alone = False
        """Whether the regularizers compare logits, and neither states nor features."""
        self._recording = contextlib.ExitStack()
        self._observed: _Observed | None = None

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

    def sizes(self, method: str) -> tuple[int, ...]:
        """Number of classes of each task of the stream: as given in advance, else equal shares."""
        if self.task_sizes is not None:
            return self.task_sizes
        if self.num_classes is None or self.num_tasks is None or self.num_classes % self.num_tasks:
            raise ConfigError(
                f"{method} must know which classes belong to which task: begin tasks that have .classes, or give "
                "task_sizes, or num_classes and num_tasks that divide evenly"
            )
        return (self.num_classes // self.num_tasks,) * self.num_tasks

    def classes(self, method: str, task: TaskInfo | None = None) -> range:
        """The classes of a task, by default the current one: as the task says, else its share of all classes."""
        task = self.current if task is None else task
        if task.classes is not None:
            return task.classes
        sizes = self.sizes(method)
        return range(sum(sizes[: task.index]), sum(sizes[: task.index + 1]))

    def augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the training transform, on the module's device."""
        train = self.transforms.train
        return self._model_input(raw if train is None else train(raw, generator))

    def normalized(self, raw: Tensor) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the evaluation transform, on the module's device."""
        evaluation = self.transforms.evaluation
        return self._model_input(raw if evaluation is None else evaluation(raw))

    def strongly_augmented(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Raw images ``[b, c, h, w]`` uint8 through the strong augmentation, on the module's device."""
        strong = self.transforms.strong
        return self._model_input(raw if strong is None else strong(raw, generator))

    def _model_input(self, images: Tensor) -> Tensor:
        like = next(self.module.parameters())
        if images.dtype is torch.uint8:
            images = images.to(like.dtype) / 255
        return images.to(like.device, like.dtype)

    # Called by the method while it trains.

    def record(self, *, states: bool, features: bool, logits: bool) -> None:
        """Record these of the module's forwards from the second task on: what the regularizers compare."""
        if states or features or logits:
            options = self.states_options
            self._recorder = Recorder(self.module, states=states, features=features, logits=logits, **options)
        self.compares_logits_alone = logits and not (states or features)

    def begin_task(self, task: TaskInfo, *, needs_old: bool) -> None:
        """Start a task; the old model is copied if there is none yet, or if frozen weights have changed."""
        again = self.task is not None and self.task.index == task.index
        self.task = task
        if needs_old and task.index > 0:
            if self.old is None or (not again and self.old.is_stale()):
                self.keep_old()
            assert self.old is not None
            self.old.to(self.device)

    def keep_old(self, state: Mapping[str, Any] | None = None) -> None:
        """Copy the module as it is: the old model from now on. With a ``state`` of an old model it is restored."""
        self.old = OldModel(self.module, **self.states_options)
        if state is not None:
            self.old.load_state_dict(state)

    def begin_step(self, batch_size: int) -> None:
        """Note how many samples of the current task the step has; forget the forward of one that was not finished."""
        self.batch_size, self._observed = batch_size, None

    def record_until_task_end(self) -> None:
        """Record from now to the end of the task, where a user's own loop runs the model."""
        self._recording.close()
        if self.own_loop and self.old is not None and self.supply is None:
            self._recording.enter_context(self._record_forward())

    def stop_recording(self) -> None:
        """Stop recording; drop the observed forward, and with it the batch and the graph it keeps alive."""
        self._recording.close()
        self._observed = None
        if self._recorder is not None:
            self._recorder.clear()

    def state_dict(self) -> dict[str, Any]:
        """The task, the old model and the random generator."""
        task = self.task
        block = None if task is None or task.classes is None else [task.classes.start, task.classes.stop]
        return {
            "task": None if task is None else {"index": task.index, "classes": block, "past": task.past},
            "old": None if self.old is None else self.old.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore task and generator of :meth:`state_dict`; the old model once components have frozen their share."""
        self.stop_recording()
        if (task := state["task"]) is not None:
            block = None if task["classes"] is None else range(*task["classes"])
            self.task = TaskInfo(task["index"], block, task["past"])
        self.generator.set_state(state["generator"].cpu())
        self.old = None

    # A step: a forward that is observed, then the same forward of the old model.

    def forward(self, x: Input, *, current_rows: int | None = None, **kwargs: Any) -> Tensor:
        """Run the module on ``x: [b, ...]`` and keep what the regularizers of this step ask for.

        A mapping of keyword arguments stands for ``module(**x)``. ``current_rows`` is how many leading rows are samples
        of the current task (all by default): the regularizers compare old and new on those. ``kwargs`` go to the
        module; the old model gets them too.
        """
        if self.old is None or self._recorder is None:
            return logits_of(run_model(self.module, x, **kwargs))
        if self.supply is not None:
            return self._forward_with_supplied(x, kwargs)
        with contextlib.nullcontext() if self.own_loop else self._record_forward():
            logits = logits_of(run_model(self.module, x, **kwargs))
            new = self._take_record()
        if current_rows is not None:
            new = new.rows(slice(current_rows))
            x = x[:current_rows] if isinstance(x, Tensor) else {key: value[:current_rows] for key, value in x.items()}
        self._observed = _Observed(new, x, kwargs)
        return logits

    def _forward_with_supplied(self, x: Input, kwargs: Mapping[str, Any]) -> Tensor:
        """Run the module on ``x`` and, in the same call where it can be, on the input that a component supplies.

        One call where both are token ids of one length; a batch statistic, if the module has one, is then of both. With
        a mapping or ``kwargs``, which are for the rows of ``x``, the supplied input is run by itself.
        """
        assert self.supply is not None
        if self._observed is not None or kwargs or not isinstance(x, Tensor):
            return logits_of(run_model(self.module, x, **kwargs))
        supplied, known = self.supply()
        if not isinstance(supplied, Tensor) or supplied.shape[1:] != x.shape[1:]:
            self._observe_supplied(supplied, known)
            return logits_of(run_model(self.module, x))
        # One call costs less than two where batches are small.
        with self._record_forward():
            logits = logits_of(run_model(self.module, torch.cat((x, supplied))))
            new = self._take_record()
        # One split, because the gradients of two slices are two tensors of zeros that are filled and added.
        own: Tensor
        own, others = torch.split(logits, [len(x), len(supplied)])
        new = new.rows(slice(len(x), None))
        if new.logits is not None:
            new = new._replace(logits=others)
        self._observed = _Observed(new, supplied, {}, known)
        return own

    def _observe_supplied(self, supplied: Input, known: Tensor | None) -> None:
        """Run the module on the input that a component supplies, and keep what the regularizers ask for."""
        with self._record_forward():
            run_model(self.module, supplied)
            self._observed = _Observed(self._take_record(), supplied, {}, known)

    def old_forward_kwargs(self, **kwargs: Any) -> None:
        """Replace the keyword arguments with which the old model is run for the observed forward."""
        if self._observed is not None:
            self._observed = self._observed._replace(kwargs=kwargs)

    def observe(self, x: Input) -> None:
        """Take what was recorded of the forward that the user's loop ran on ``x``."""
        if self.old is None or self._recorder is None or self.supply is not None:
            return
        try:
            new = self._take_record()
        except ConfigError:
            raise ConfigError(
                "the model has run no forward since the last penalty: call penalty(x) once after each model(x)"
            ) from None
        self._observed = _Observed(new, x, {})
        if torch.is_grad_enabled() and not self._recorder.with_gradient:
            raise ConfigError(
                "the model's last forward ran under torch.no_grad(), so the penalty would have no gradient: call "
                "penalty(x) right after model(x), before any forward under no_grad (to measure the penalty without "
                "training, call penalty(x) under no_grad, too)"
            )
        if self.batch_size and new.batch_size not in (1, self.batch_size):  # states without input have one row
            raise ConfigError(
                f"the model's last forward had {new.batch_size} rows, the penalty is asked for {self.batch_size}: call "
                "penalty(x) right after model(x), with the same x"
            )

    def compare(self, fractions: Collection[float] = (1.0,)) -> ModelPair:
        """Repeat the observed forward with the old model; :data:`NOTHING` if there is no old model yet.

        Where all ``fractions`` are below 1 the old model runs only on the rows of the largest.
        """
        if self.old is None:
            return NOTHING
        if self.supply is not None and self._observed is None:  # a user's own loop ran the model
            self._observe_supplied(*self.supply())
        observed, self._observed = self._observed, None
        if observed is None:
            raise ConfigError(
                "no forward of the model was observed since the last step; run the model before the penalty"
            )
        (new, x, kwargs, known), order, count = observed, None, count_rows(observed.x)
        if min(fractions) < 1:
            order = torch.randperm(count, generator=self.generator).to(self.device)
            if (most := num_rows(max(fractions), count)) < count:
                rows, order = order[:most], torch.arange(most, device=self.device)
                new, kwargs = new.rows(rows), take_rows(kwargs, rows, count)
                x = x[rows] if isinstance(x, Tensor) else take_rows(x, rows, count)
                known = None if known is None else known[rows]
        if known is not None:
            old = Observation([], logits=known)
        else:
            old = self.old.observe(
                x,
                states=len(new.states) > 0,
                features=new.features is not None,
                logits=new.logits is not None,
                **kwargs,
            )
        mask = x.get("attention_mask", x.get("mask")) if isinstance(x, Mapping) else None
        return ModelPair(old, new, mask, order, count)

    def _record_forward(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._recorder is None else self._recorder.recording()

    def _take_record(self) -> Observation:
        assert self._recorder is not None
        return self._recorder.taken()


def count_rows(x: Input) -> int:
    """Number of samples in a model's input."""
    return len(x if isinstance(x, Tensor) else next(iter(x.values())))


def num_rows(fraction: float, count: int) -> int:
    """How many of ``count`` rows a fraction stands for: rounded up, so at least one."""
    return min(count, math.ceil(round(fraction * count, 9)))


def take_rows(values: Mapping[str, Any], rows: Tensor, count: int) -> dict[str, Any]:
    """Keyword arguments of a call on ``rows: [m]`` of ``count``: tensors with one entry per sample are cut to these."""
    return {
        key: value[rows] if isinstance(value, Tensor) and value.ndim > 0 and len(value) == count else value
        for key, value in values.items()
    }
