"""Base of ewc, mas, si and ucl: the parameters that form states, and a quadratic penalty on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.contract import ComponentConfig, Context, Loader, ModelPair, Regularizer, TaskInfo, Terms
from infssm.methods.core.passes import require_loader
from infssm.ssm import state_parameters

Values = dict[str, Tensor]
"""One tensor per member of a set, of the shape of its rows."""

Which = Literal["AC-direct", "ABC-direct", "ABC-full"]


class Member(NamedTuple):
    """Some rows of one parameter (all where ``rows`` is None)."""

    key: str
    name: str
    parameter: nn.Parameter
    rows: slice | None

    def take(self, tensor: Tensor) -> Tensor:
        """The member's rows of a tensor shaped like its parameter: a view."""
        return tensor if self.rows is None else tensor[self.rows]


class ParameterSet:
    """Rows of parameters by name. Rows outside the set are never touched."""

    def __init__(self, module: nn.Module, which: str, *, layers: str | int | tuple[str, ...] = "all") -> None:
        self.members = [
            Member(_key(name, rows), name, parameter, rows)
            for name, parameter, rows in state_parameters(module, which, layers=layers)
            if parameter.requires_grad
        ]
        if not self.members:
            raise ConfigError(f"none of the parameters {which} is trained: all are frozen")

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the set holds rows of, each once."""
        return {member.name: member.parameter for member in self.members}

    def take(self, tensors: Mapping[str, Tensor]) -> Values:
        """Views of the set's rows in full tensors given by parameter name; names that are missing are left out."""
        return {m.key: m.take(tensors[m.name]) for m in self.members if m.name in tensors}

    def values(self) -> Values:
        """The rows as they are, differentiable."""
        return {member.key: member.take(member.parameter) for member in self.members}

    def clone(self) -> Values:
        """A detached copy of the rows."""
        return {key: value.detach().clone() for key, value in self.values().items()}

    def zeros(self) -> Values:
        """Zeros, float32 at least."""
        return {key: torch.zeros_like(v, dtype=sum_dtype(v.dtype)) for key, v in self.clone().items()}

    def gradients(self, loss: Tensor) -> Values:
        """Gradients of a scalar with respect to the rows; zeros where it does not depend on them or they are frozen."""
        parameters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return self.zeros() | self.take({n: g.to(sum_dtype(g.dtype)) for n, g in zip(parameters, found, strict=True)})

    def to_device(self, values: Mapping[str, Tensor]) -> Values:
        """``values`` on the devices of their parameters; keys must be those of the set."""
        if set(values) != {member.key for member in self.members}:
            raise ConfigError("these importances belong to another model or another set of parameters")
        return {member.key: values[member.key].to(member.parameter.device) for member in self.members}


def quadratic(values: Mapping[str, Tensor], importance: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """``Σ importance · (value - anchor)²`` over all keys of ``values``, a scalar."""
    terms = [(importance[key] * (value - anchor[key]).square()).sum() for key, value in values.items()]
    return torch.stack(terms).sum()


def _key(name: str, rows: slice | None) -> str:
    if rows is None:
        return name
    bounds = ["" if bound is None else str(bound) for bound in (rows.start, rows.stop)]
    return f"{name}[{':'.join(bounds)}]"


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over samples are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class QuadraticConfig(ComponentConfig):
    """Options of every method with a quadratic penalty on parameters."""

    weight: float = Field(1.0, ge=0, description="factor on Σ importance · (θ - θ*)²")
    params: Which = Field(
        "ABC-direct",
        description="parameters held: those that form (A, C), (A, B, C), or also what feeds them (paper: (A, B, C))",
    )


class QuadraticRegularizer(Regularizer):
    """``weight · Σ importance · (θ - θ*)²`` with θ* the parameters at the end of the last task."""

    Config: ClassVar[type[ComponentConfig]] = QuadraticConfig
    config: QuadraticConfig
    saved: ClassVar[tuple[str, ...]] = ("importance", "anchor")

    def __init__(self, config: QuadraticConfig, context: Context) -> None:
        super().__init__(config, context)
        self.parameters = ParameterSet(context.module, config.params, layers=context.layers)
        self.importance: Values | None = None
        self.anchor: Values | None = None

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Follow the model to its device."""
        self._follow_device()

    def penalty(self, pair: ModelPair) -> Terms:  # noqa: ARG002
        """The term ``penalty``."""
        return {"penalty": self.config.weight * self.squared_distance()}

    def squared_distance(self) -> Tensor:
        """``Σ importance · (θ - θ*)²``, a scalar."""
        assert self.importance is not None
        assert self.anchor is not None
        return quadratic(self.parameters.values(), self.importance, self.anchor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore importances and anchors, which must be those of the same parameters."""
        super().load_state_dict(state)
        self._follow_device()

    def _follow_device(self) -> None:
        for name in self.saved:
            if (values := getattr(self, name)) is not None:
                setattr(self, name, self.parameters.to_device(values))


class MeasuredRegularizer(QuadraticRegularizer):
    """A quadratic penalty whose importances are measured on a task's data when it ends."""

    needs_loader = True
    importances = "importances"
    """Name of the measured values in error messages."""

    @property
    def decay(self) -> float:
        """Factor on the importances of earlier tasks when those of another join them."""
        return 1.0

    @abstractmethod
    def measure(self, task: TaskInfo, loader: Loader) -> Values:
        """Importances of the parameters for a task."""

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Check that importances of earlier tasks were measured."""
        super().begin_task(task, loader)
        if task.index > 0 and self.importance is None:
            raise ConfigError(
                f"{self.name} has no {self.importances} of old tasks: call method.end_task(task, loader) of the task "
                "before first"
            )

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Add this task's importances to the old ones, and hold the parameters where they are now."""
        loader = require_loader(loader, self.name, "measures importances on the task's data")
        new, old = self.measure(task, loader), self.importance
        self.importance = new if old is None else {key: self.decay * old[key] + new[key] for key in new}
        self.anchor = self.parameters.clone()
