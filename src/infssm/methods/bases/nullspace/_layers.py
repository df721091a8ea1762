"""The matrices of selective layers, and second moments of what each is multiplied with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.bases.moments import Inputs, masked, second_moment
from infssm.ssm import find_mixers, unwrap

_DIRECTIONS = (("x_proj", "dt_proj", "A_log"), ("x_proj_b", "dt_proj_b", "A_b_log"))
"""Names in a mixer, of Mamba and of the backward direction of Vim."""


class Matrix(NamedTuple):
    """Rows of a parameter whose steps are projected.

    ``moment`` names the second moment ``[D, D]`` that the projection follows from, ``side`` from where it multiplies.
    """

    parameter: Tensor
    rows: slice
    moment: str
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Direction:
    """One scan: ``x_proj`` has rows for delta (rank), B (n) and C (n), in this order."""

    name: str
    x_proj: nn.Linear
    dt_proj: nn.Linear
    A_log: nn.Parameter

    def matrices(self) -> list[Matrix]:
        """The rows of x_proj for delta, B and C, and A_log."""
        n, rank, weight = self.A_log.shape[1], self.dt_proj.in_features, self.x_proj.weight
        return [
            Matrix(weight, slice(0, rank), f"{self.name}.x"),
            Matrix(weight, slice(rank, rank + n), f"{self.name}.delta_x"),
            Matrix(weight, slice(rank + n, rank + 2 * n), f"{self.name}.x"),
            Matrix(self.A_log, slice(None), f"{self.name}.delta", "left"),
        ]

    def moments(self, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Second moments of the scan's input ``x: [b, tokens, D]``, of its steps delta, and of their products.

        The layer is unchanged on ``x`` where updates U fulfil ``x U_delta = 0``, ``x U_C = 0``, ``delta U_A = 0`` and
        ``(Σ_t delta_t x_tᵀ) U_B = 0``.
        """
        low = F.linear(x, self.x_proj.weight[: self.dt_proj.in_features])
        delta = F.softplus(F.linear(low, self.dt_proj.weight, self.dt_proj.bias))
        x, delta = (masked(value.double(), mask) for value in (x, delta))
        products = delta.transpose(1, 2) @ x
        return {
            f"{self.name}.x": second_moment(x, mask),
            f"{self.name}.delta": second_moment(delta, mask),
            f"{self.name}.delta_x": second_moment(products, None),
        }


@dataclass(frozen=True)
class Layer:
    """A mixer with one or two scans and one output projection."""

    name: str
    directions: list[Direction]
    out_proj: nn.Linear

    def matrices(self) -> list[Matrix]:
        """All matrices whose steps are projected."""
        own = [matrix for direction in self.directions for matrix in direction.matrices()]
        return [*own, Matrix(self.out_proj.weight, slice(None), f"{self.name}.out_proj")]


class Gathering:
    """Collects what the projections of some layers are given in the forwards of a block."""

    def __init__(self, layers: list[Layer], stack: contextlib.ExitStack) -> None:
        self._outputs = [Inputs(f"{layer.name}.out_proj", layer.out_proj, stack) for layer in layers]
        self._scans = [(d, Inputs(d.name, d.x_proj, stack)) for layer in layers for d in layer.directions]

    def take(self, mask: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """The second moments of the last forward, summed over samples; ``mask: [b, tokens]`` leaves out padding."""
        for direction, inputs in self._scans:
            yield from direction.moments(inputs.take(), mask).items()
        for inputs in self._outputs:
            yield inputs.name, second_moment(masked(inputs.take().double(), mask), mask)


def find_layers(model: nn.Module, layers: Any) -> list[Layer]:
    """The selective layers of a model, of those that ``layers`` chooses; ConfigError where there are others."""
    found = []
    for name, mixer in find_mixers(unwrap(model), layers).items():
        present = [names for names in _DIRECTIONS if all(hasattr(mixer, one) for one in names)]
        parts = [Direction(f"{name}.{names[0]}", *(getattr(mixer, one) for one in names)) for names in present]
        out: Any = getattr(mixer, "out_proj", None)
        linear = [out, *(layer for part in parts for layer in (part.x_proj, part.dt_proj))]
        normed = any(hasattr(mixer, f"{one}_layernorm") for one in ("dt", "b", "c"))
        if not parts or normed or any(type(layer) is not nn.Linear for layer in linear):
            raise ConfigError(
                f"nullspace projects x_proj, A_log and out_proj of Mamba's and Vim's layers, and {name} "
                f"({type(mixer).__name__}) is of another kind or has adapters; use another method, or choose layers"
            )
        found.append(Layer(name, parts, out))
    return found
