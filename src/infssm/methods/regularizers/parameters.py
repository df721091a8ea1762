"""The parameters that form a model's states, as the set on which ewc, si, mas and ucl act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
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
        """The parameters of which the set holds rows, each once."""
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

    def squared_distance(self, importance: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
        """``Σ importance · (θ - anchor)²`` over the rows, a scalar."""
        return quadratic(self.values(), importance, anchor)

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
