"""`Method`: a base and its regularizers as one object, for the library's loop and for anyone's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods._contract import (
    Base,
    BatchLike,
    Component,
    ComponentConfig,
    Context,
    Loader,
    Regularizer,
    TaskInfo,
    Terms,
)
from infssm.states import OldModel, Recorder


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
    """One base plus regularizers. Built by :func:`infssm.attach`; see there for the loop it fits into."""

    def __init__(
        self,
        name: str,
        context: Context,
        base: Base,
        regularizers: Sequence[Regularizer],
        states: StatesConfig,
    ) -> None:
        self.name = name
        self.context = context
        self.base = base
        self.regularizers = list(regularizers)
        context.states_options = states.model_dump()
        self._recording = contextlib.ExitStack()
        context.module = base.prepare(context.module)
        if self.needs_states:
            context.recorder = Recorder(context.module, **context.states_options)

    @property
    def module(self) -> nn.Module:
        """The module to train, evaluate and save; ``module(x)`` gives logits over all classes."""
        return self.context.module

    @property
    def components(self) -> list[Component]:
        """Base first, then the regularizers."""
        return [self.base, *self.regularizers]

    @property
    def needs_states(self) -> bool:
        """Whether an old model and recorded states are used."""
        return any(r.needs_states for r in self.regularizers)

    def begin_task(self, task: Any, loader: Loader | None = None) -> None:
        """Start a task: an int, or an object with ``index`` and ``classes``. ``loader`` yields its training batches."""
        info = TaskInfo.of(task)
        self.context.task = info
        for component in self.components:
            component.begin_task(info, loader)
        self._watch()

    def _watch(self) -> None:
        context = self.context
        if context.watching and context.old is not None and context.recorder is not None:
            self._recording.enter_context(context.recorder.recording())

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
        return self.base.loss(batch) | self._penalty_terms()

    def penalty(self, x: Tensor) -> Tensor:
        """Sum of the regularizers' terms for the model's last forward, which must have been on ``x: [b, ...]``."""
        context = self.context
        if context.old is not None and context.recorder is not None:
            context._observed = context.recorder.flat()
            context._old_call = (x, {})
        return torch.stack([x.new_zeros((), dtype=torch.float32), *self._penalty_terms().values()]).sum()

    def _penalty_terms(self) -> Terms:
        terms: Terms = {}
        if self.context.current.index == 0:
            return terms
        states = self.context.states() if self.needs_states else None
        for regularizer in self.regularizers:
            terms |= {f"{regularizer.name}/{k}": v for k, v in regularizer.penalty(states).items()}
        return terms

    def after_step(self) -> None:
        """Call after every optimiser step."""
        for component in self.components:
            component.after_step()

    def end_task(self, task: Any, loader: Loader | None = None) -> None:
        """Consolidate: statistics, buffers, and the frozen old model for the next task."""
        info = TaskInfo.of(task)
        self._recording.close()
        for component in self.components:
            component.end_task(info, loader)
        if self.needs_states:
            self.context.old = OldModel(self.module, **self.context.states_options)

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let the components rewrite the optimiser's parameter groups."""
        for component in self.components:
            groups = component.param_groups(groups)
        return groups

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into a method built with the same name and options."""
        if state["name"] != self.name:
            raise ConfigError(f"this is the state of method {state['name']!r}, not of {self.name!r}")
        if (task := state["task"]) is not None:
            self.context.task = TaskInfo(task[0], range(*task[1:]) if len(task) > 1 else None)
        if state["old"] is not None:
            self.context.old = OldModel(self.module, **self.context.states_options)
            self.context.old.load_state_dict(state["old"])
        for component in self.components:
            component.load_state_dict(state["components"][component.name])
        self._recording.close()
        self._watch()
