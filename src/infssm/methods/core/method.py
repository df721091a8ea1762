"""`Method`: a base, its regularizers and its head as one object, for the library's loop and for anyone's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.contract import (
    Base,
    BatchLike,
    Component,
    ComponentConfig,
    Context,
    Regularizer,
    TaskInfo,
    Terms,
)
from infssm.methods.core.head import Head
from infssm.methods.core.passes import Batches
from infssm.methods.core.rows import count_rows
from infssm.models.features import TRAINED, classifier_prefix, trained_classifier
from infssm.ssm import OldModel, unwrap


class StatesConfig(ComponentConfig):
    """How states are read; shared by all regularizers of a method (spec: state extraction)."""

    include_dt_bias: bool = Field(
        True, description="Δ with dt_proj.bias, as the paper's equation; False repeats the released code"
    )
    b_mode: Literal["raw", "euler", "zoh"] = Field("raw", description="B itself, Δ·B, or the zero-order hold of B")
    layers: Literal["all"] | int | tuple[str, ...] = Field(
        "all", description="'all', the number of last state space layers, or layer names"
    )


class Method:
    """One base, any regularizers, one head. Built by :func:`infssm.attach`; see there for the loop it fits into."""

    def __init__(
        self,
        name: str,
        context: Context,
        base: Base,
        regularizers: Sequence[Regularizer],
        head: Head,
    ) -> None:
        self.name = name
        self.context = context
        self.base = base
        self.regularizers = list(regularizers)
        self.head = head
        self._recording = contextlib.ExitStack()

    @property
    def module(self) -> nn.Module:
        """The module to train, evaluate and save; ``module(x)`` gives logits over all classes."""
        return self.context.module

    @property
    def components(self) -> list[Component]:
        """Base first, then the regularizers, the head last."""
        return [self.base, *self.regularizers, self.head]

    @property
    def needs_states(self) -> bool:
        """Whether states are recorded and compared with the old model's."""
        return any(r.needs_states for r in self.regularizers)

    @property
    def needs_old(self) -> bool:
        """Whether a frozen old model is kept."""
        return self.head.needs_old or any(r.compares for r in self.regularizers)

    def trains(self, task: int) -> bool:
        """Whether steps on a task make a difference; with frozen features and a fitted head only the first do."""
        return task == 0 or not (self.base.freezes and self.head.fitted)

    def begin_task(self, task: Any, loader: Any = None, *, lr: float | None = None) -> None:
        """Start a task: its 0-based index, or an object with ``index`` and ``classes``.

        ``loader`` yields its training batches, ``lr`` is its base learning rate where known. A task after the first
        that follows no ``end_task`` (a model trained elsewhere), or a change of frozen weights since then (an adapter
        was merged into them), is held to the model as it is now.
        """
        info = TaskInfo.of(task)
        progress = self.context.progress
        again = progress.task is not None and progress.task.index == info.index
        progress.task, progress.lr = info, lr
        self.head.withdraw()
        if self.needs_old and info.index > 0:
            if progress.old is None or (not again and progress.old.is_stale()):
                progress.old = self._copy()
            progress.old.to(self.context.device)
        loader = None if loader is None else Batches(loader)
        for component in self.components:
            component.begin_task(info, loader)
        self._watch()

    def _copy(self) -> OldModel:
        return OldModel(self.module, **self.context.states_options)

    def _watch(self) -> None:
        """Record from now to the end of the task, where a user's own loop runs the model."""
        context = self.context
        self._recording.close()
        if context.own_loop and context.old is not None:
            self._recording.enter_context(context.recording())

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Announce an epoch of the current task."""
        for component in self.components:
            component.begin_epoch(epoch, epochs)

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Announce the end of an epoch."""
        for component in self.components:
            component.end_epoch(epoch, epochs)

    def loss(self, batch: BatchLike) -> Terms:
        """All loss terms of a step, weighted; their sum is what to minimise."""
        if batch.soft is not None and not self.base.takes_soft_labels:
            raise ConfigError(f"{self.base.name} trains on class labels: give batches without soft targets (soft=None)")
        self.context.progress.batch_size = len(batch.y)
        return self.base.loss(batch) | self._penalty_terms()

    def penalty(self, x: Tensor | Mapping[str, Any]) -> Tensor:
        """Sum of the regularizers' terms for the model's last forward, which must have been on ``x: [b, ...]``.

        A mapping of keyword arguments stands for ``model(**x)``.
        """
        return sum(self.penalty_terms(x).values(), start=torch.zeros((), device=self.context.device))

    def penalty_terms(self, x: Tensor | Mapping[str, Any]) -> Terms:
        """The terms of :meth:`penalty` by name, ``"regularizer/term"``, weighted."""
        self.context.progress.batch_size = count_rows(x)
        if self.context.current.index > 0:
            self.context.observe(x)
        return self._penalty_terms()

    def _penalty_terms(self) -> Terms:
        first = self.context.current.index == 0
        active = [regularizer for regularizer in self.regularizers if regularizer.acts_on_first_task or not first]
        fractions = [r.fraction for r in active if r.compares]
        pair = self.context.states(fractions) if fractions else None
        pairs = {r: None if pair is None else pair.subset(r.fraction) for r in active}
        return {f"{r.name}/{key}": value for r, pair in pairs.items() for key, value in r.penalty(pair).items()}

    def after_step(self) -> None:
        """Call after every optimizer step."""
        for component in self.components:
            component.after_step()

    def end_task(self, task: Any, loader: Any = None, images: Any = None) -> None:
        """Consolidate: statistics, buffers, the frozen old model for the next task, and a fitted head.

        ``loader`` yields the task's training batches, without mixup, for the methods that measure on them; ``images``
        the same images without augmentation, for heads (``loader`` serves where it is not given).
        """
        info = TaskInfo.of(task)
        self._recording.close()
        self.context.forget()
        self.head.withdraw()
        images = loader if images is None else images
        for component in (self.base, *self.regularizers):
            component.end_task(info, None if loader is None else Batches(loader))
        if self.base.joint:
            self.head.reset()
        self.head.end_task(info, None if images is None else Batches(images))
        if self.needs_old:
            self.context.progress.old = self._copy()
        self.head.install()  # last, so that the old model keeps the classifier that is trained

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let the components rewrite the optimizer's parameter groups."""
        for component in self.components:
            groups = component.param_groups(groups)
        return groups

    def chosen(self) -> dict[str, float]:
        """What components set by themselves so far: ``{"inf-ssm-exact.weight": 310.0}``."""
        return {f"{c.name}.{option}": value for c in self.components for option, value in c.chosen().items()}

    def warnings(self) -> list[str]:
        """What a user should know before training with these components on this model."""
        return [text for component in self.components for text in component.warnings()]

    def state_dict(self) -> dict[str, Any]:
        """With the module's own ``state_dict``, all that resuming needs."""
        old, task = self.context.old, self.context.task
        return {
            "name": self.name,
            "task": None
            if task is None
            else [task.index, *((task.classes.start, task.classes.stop) if task.classes else ())],
            "old": None if old is None else old.state_dict(),
            "components": {c.name: c.state_dict() for c in self.components},
            "head": self.head.reached(),
            "generator": self.context.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into a method built with the same name and options."""
        if set(state["components"]) != {component.name for component in self.components}:
            raise ConfigError(f"this is the state of method {state['name']!r}, not of {self.name!r}")
        if (task := state["task"]) is not None:
            self.context.progress.task = TaskInfo(task[0], range(*task[1:]) if len(task) > 1 else None)
        self.context.forget()
        self.context.generator.set_state(state["generator"].cpu())
        self._recording.close()
        self.head.withdraw()
        self.context.progress.old = None
        for component in self.components:
            component.load_state_dict(state["components"][component.name])
        if state["old"] is not None:  # now that components have frozen what they freeze
            self.context.progress.old = self._copy()
            self.context.progress.old.load_state_dict(state["old"])
        self.head.restore(state["head"])
        self._watch()

    def weights(self) -> dict[str, Tensor]:
        """The module's tensors by name; where a fitted head is installed, also those of the classifier in training."""
        reached = self.head.reached()
        trained = {} if reached is None else reached["trained"]
        return self.module.state_dict() | {TRAINED + key: value for key, value in trained.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load :meth:`weights`, and with them the head that was reached."""
        self.head.withdraw()
        if trained := trained_classifier(weights):
            prefix = classifier_prefix(self.module, unwrap(self.module))
            fitted = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            self.head.restore({"fitted": fitted, "trained": trained})
        self.module.load_state_dict({k: v for k, v in weights.items() if not k.startswith(TRAINED)})
