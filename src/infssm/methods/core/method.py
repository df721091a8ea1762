"""`Method`: a base, its regularizers and its head as one object, for the library's loop and for a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.context import NOTHING, Context, count_rows
from infssm.methods.core.contract import Base, Component, ComponentConfig, Head, Regularizer, Terms
from infssm.methods.core.tasks import Batches, BatchLike, Input, TaskInfo
from infssm.models.features import TRAINED, classifier_prefix, trained_classifier, with_rows_of
from infssm.ssm import unwrap


class StatesConfig(ComponentConfig):
    """How states are read; shared by all regularizers of a method."""

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
        self.components: list[Component] = [base, *regularizers, head]
        """Base first, then the regularizers, the head last."""

    @property
    def module(self) -> nn.Module:
        """The module to train, evaluate and save; ``module(x)`` gives logits over all classes."""
        return self.context.module

    @property
    def needs_states(self) -> bool:
        """Whether states are recorded and compared with the old model's."""
        return any(regularizer.needs_states for regularizer in self.regularizers)

    @property
    def needs_old(self) -> bool:
        """Whether a frozen old model is kept. Heads follow moving features with it, and frozen ones do not move."""
        follows = self.head.needs_old and not self.base.freezes
        return follows or self.base.needs_old or any(regularizer.compares for regularizer in self.regularizers)

    def trains(self, task: int) -> bool:
        """Whether steps on a task make a difference; with frozen features and a fitted head only the first do."""
        return task == 0 or not (self.base.freezes and self.head.fitted)

    def begin_task(self, task: Any, loader: Any = None) -> None:
        """Start a task: its 0-based index, or an object with ``index`` and ``classes``.

        ``loader`` yields its training batches. A task after the first that follows no ``end_task`` (a model trained
        elsewhere), or a change of frozen weights since then (an adapter was merged into them), is held to the model as
        it is now.
        """
        info = TaskInfo.of(task)
        self.head.withdraw()
        self.context.begin_task(info, needs_old=self.needs_old)
        batches = None if loader is None else Batches(loader)
        for component in self.components:
            component.begin_task(info, batches)
        self.context.record_until_task_end()

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
        if batch.soft is not None and not self.base.supports_soft_labels:
            raise ConfigError(f"{self.base.name} trains on class labels: give batches without soft targets (soft=None)")
        self.context.begin_step(len(batch.y))
        return self.base.loss(batch) | self._regularizer_terms()

    def penalty(self, x: Input) -> Tensor:
        """Sum of the regularizers' terms for the model's last forward, which must have been on ``x: [b, ...]``.

        A mapping of keyword arguments stands for ``model(**x)``.
        """
        return sum(self.penalty_terms(x).values(), start=torch.zeros((), device=self.context.device))

    def penalty_terms(self, x: Input) -> Terms:
        """The terms of :meth:`penalty` by name, ``"regularizer/term"``, weighted."""
        self.context.begin_step(count_rows(x))
        if self.context.current.index > 0:
            self.context.observe(x)
        return self._regularizer_terms()

    def _regularizer_terms(self) -> Terms:
        active = self.regularizers
        if self.context.current.index == 0:
            active = [regularizer for regularizer in active if regularizer.acts_on_first_task]
        fractions = [regularizer.fraction for regularizer in active if regularizer.compares]
        pair = self.context.compare(fractions) if fractions else NOTHING
        terms: Terms = {}
        for regularizer in active:
            for key, value in regularizer.penalty(pair.subset(regularizer.fraction)).items():
                terms[f"{regularizer.name}/{key}"] = value
        return terms

    def after_step(self) -> None:
        """Call after every optimizer step."""
        for component in self.components:
            component.after_step()

    def end_task(self, task: Any, loader: Any = None, images: Any = None) -> None:
        """Consolidate: statistics, buffers, the frozen old model for the next task, and a fitted head.

        ``loader`` yields the task's training batches, without mixup, for the methods that measure on them; ``images``
        the same images without augmentation, for heads (by default ``loader``).
        """
        info = TaskInfo.of(task)
        self.context.stop_recording()
        self.head.withdraw()
        images = loader if images is None else images
        for component in (self.base, *self.regularizers):
            component.end_task(info, None if loader is None else Batches(loader))
        if self.base.joint:
            self.head.reset()
        self.head.end_task(info, None if images is None else Batches(images))
        if self.needs_old:
            self.context.keep_old()
        self.head.install()  # last, so that the old model keeps the classifier that is trained

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let the components rewrite the optimizer's parameter groups."""
        for component in self.components:
            groups = component.param_groups(groups)
        return groups

    def automatic_options(self) -> dict[str, float]:
        """Options that components measured themselves, so far: ``{"inf-ssm-exact.weight": 310.0}``."""
        return {f"{c.name}.{key}": value for c in self.components for key, value in c.automatic_options().items()}

    def warnings(self) -> list[str]:
        """Notes for users before training with these components on this model."""
        return [text for component in self.components for text in component.warnings()]

    def state_dict(self) -> dict[str, Any]:
        """Together with the module's ``state_dict``, everything that resuming needs."""
        return {
            "name": self.name,
            **self.context.state_dict(),
            "components": {component.name: component.state_dict() for component in self.components},
            "head": self.head.installed_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into a method built with the same name and options."""
        if set(state["components"]) != {component.name for component in self.components}:
            raise ConfigError(f"this is the state of method {state['name']!r}, not of {self.name!r}")
        self.context.load_state_dict(state)
        self.head.withdraw()
        for component in self.components:
            component.load_state_dict(state["components"][component.name])
        if state["old"] is not None:  # now that components have frozen what they freeze
            self.context.keep_old(state["old"])
        self.head.restore(state["head"])
        self.context.record_until_task_end()

    def grow_from(self, state: Mapping[str, Any], module: Mapping[str, Tensor]) -> None:
        """Continue a method that was built for fewer classes or as many; outputs of new classes are as initialized.

        Args:
            state: state of that method, see :meth:`state_dict`.
            module: the ``state_dict`` of its module; a fitted head that stands in it is fitted again at the next end
                of a task, so the classifier in training takes its place.
        """
        weights = dict(module)
        if state["head"] is not None:
            prefix = classifier_prefix(self.module, unwrap(self.module))
            weights = {name: value for name, value in weights.items() if not name.startswith(prefix)}
            weights |= {prefix + name: value for name, value in state["head"]["trained"].items()}
        self.module.load_state_dict(with_rows_of(weights, self.module))
        old = None if state["old"] is None else with_rows_of(state["old"], unwrap(self.module))
        self.load_state_dict({**state, "head": None, "old": old})

    def weights(self) -> dict[str, Tensor]:
        """The module's tensors by name; where a fitted head is installed, also those of the classifier in training."""
        installed = self.head.installed_state()
        trained = {} if installed is None else installed["trained"]
        return self.module.state_dict() | {TRAINED + key: value for key, value in trained.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load :meth:`weights`, and install the fitted head they have, if any."""
        self.head.withdraw()
        if trained := trained_classifier(weights):
            prefix = classifier_prefix(self.module, unwrap(self.module))
            fitted = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            self.head.restore({"fitted": fitted, "trained": trained})
        own = {k: v for k, v in weights.items() if not k.startswith(TRAINED)}
        self.module.load_state_dict(with_rows_of(own, self.module))
