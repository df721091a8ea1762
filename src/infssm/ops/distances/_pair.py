"""Two sets of systems side by side, in coordinates in which nothing cancels (docs/reference/maths.md, section 3).

A pole a of the unit disc becomes ``r = (1 - a) / (1 + a)`` in the right half-plane, where (eq. 9)
``1 - conj(a) b = 2 (conj(r) + s) / ((1 + conj(r)) (1 + s))``: sums of numbers with a positive real part take the place
of differences of numbers near 1. A raw state x, with ``a = tanh(x / 2)``, has ``r = exp(-x)``, however near to 1 a is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

# Raw poles up to here have r, and products of a few r, within float64; beyond, the result is NaN.
RAW_LIMIT = 80.0


@dataclass(frozen=True)
class Pair:
    """Old and new systems with equal leading dimensions, as the caller gave them.

    Attributes:
        old_a, new_a: ``[..., n]`` or ``[..., 1]`` (scalar transition).
        old_c, new_c: ``[..., n]``.
        old_b, new_b: ``[..., n]``, or None.
        soft: real tensors are to be soft-normalised.
    """

    old_a: Tensor
    old_c: Tensor
    new_a: Tensor
    new_c: Tensor
    old_b: Tensor | None = None
    new_b: Tensor | None = None
    soft: bool = field(default=False, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The six tensors, in the order of the fields."""
        return self.old_a, self.old_c, self.new_a, self.new_c, self.old_b, self.new_b

    @property
    def sides(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """The tensors of the old systems and those of the new ones."""
        return (self.old_a, self.old_c, self.old_b), (self.new_a, self.new_c, self.new_b)

    @property
    def normalised(self) -> bool:
        """Whether soft-normalisation applies: complex states (S4D) never are."""
        return self.soft and not self.old_a.is_complex()

    @property
    def order(self) -> int:
        """States that the observability subspace has: 1 for a scalar transition."""
        return self.old_a.shape[-1]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pair:
        """Apply ``fn`` to each tensor."""
        return Pair(*(None if x is None else fn(x) for x in self.tensors), soft=self.soft)  # type: ignore[arg-type]

    def poles(self) -> tuple[Tensor, Tensor, Tensor]:
        """r of the old poles, s of the new ones and ``s - r`` with its own precision, ``[n, ...]`` (eq. 8)."""
        a, b = states_first(self.old_a, self.new_a)
        if self.normalised:
            a, b = (x.masked_fill(x.detach().abs() > RAW_LIMIT, torch.nan) for x in (a, b))
            r = torch.exp(-a)
            return r, torch.exp(-b), r * torch.expm1(a - b)
        r, s = (nan_outside((1 - x) / (1 + x)) for x in (a, b))
        return r, s, 2 * (a - b) / ((1 + a) * (1 + b))

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output rows: old, new and new - old, ``[n, ...]``."""
        return self._values(self.old_c, self.new_c)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Input columns likewise; the caller has checked that there are any."""
        return self._values(cast(Tensor, self.old_b), cast(Tensor, self.new_b))

    def _values(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = states_first(old, new)
        if not self.normalised:
            return x, y, y - x
        c, d = torch.tanh(x / 2), torch.tanh(y / 2)
        return c, d, torch.tanh((y - x) / 2) * (1 - c * d)

    def per_pole(self, x: Tensor) -> Tensor:
        """``[n, ...]``, or its sum ``[1, ...]`` where all states share one pole: the system has order 1."""
        return x.sum(0, keepdim=True) if self.order == 1 else x

    def sorted(self) -> Pair:
        """With the poles of both systems reordered so that those of equal index are close, for formulas of poles only.

        No result depends on the order, but differences of near poles keep digits that those of far ones lose.
        """
        a, b = self.old_a, self.new_a
        if not a.is_complex():
            return replace(self, old_a=a.sort(dim=-1).values, new_a=b.sort(dim=-1).values)
        x, y = _lexicographic(a), _lexicographic(b)
        better = ((x - y).abs().square().sum(-1) < (a - b).abs().square().sum(-1)).unsqueeze(-1)
        return replace(self, old_a=torch.where(better, x, a), new_a=torch.where(better, y, b))


def in_float64(x: Tensor) -> Tensor:
    """In float64 or complex128, the precision of every formula; Apple's GPUs have none, and stay as they are."""
    return x if x.device.type == "mps" else x.to(torch.complex128 if x.is_complex() else torch.float64)


def states_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[..., n] -> [n, ...]``, contiguous: every operation runs along the systems."""
    return tuple(in_float64(x).movedim(-1, 0).contiguous() for x in tensors)


def nan_outside(r: Tensor) -> Tensor:
    """NaN in place of what came from a pole outside the unit disc."""
    return torch.where(r.detach().real > 0, r, torch.nan)


def _lexicographic(a: Tensor) -> Tensor:
    """Sorted by imaginary, then real part."""
    a = a.gather(-1, a.real.sort(dim=-1, stable=True).indices)
    return a.gather(-1, a.imag.sort(dim=-1, stable=True).indices)
