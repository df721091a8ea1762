"""Distances between old and new states."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.kernels._lattice import angles, rotation_lattice
from infssm.kernels.arc import squared_arc


def fused_distance(old_a: Tensor, old_c: Tensor, new_a: Tensor, new_c: Tensor, kind: str, raw: bool) -> Tensor:
    """Squared distance of states [..., n], soft-normalised if raw; see the public function."""
    if raw:
        old_a, old_c, new_a, new_c = (torch.tanh(value / 2) for value in (old_a, old_c, new_a, new_c))
    if kind in ("martin", "fubini-study", "binet-cauchy"):
        value = _martin(old_a, new_a)
        return value if kind == "martin" else squared_arc(value) if kind == "fubini-study" else -torch.expm1(-value)
    if kind in ("chordal", "geodesic"):  # near poles paired: their differences keep digits that those of far ones lose
        sine, cosine = rotation_lattice(old_a.sort(dim=-1).values, new_a.sort(dim=-1).values)
        return 2 * sine.square().sum((-2, -1)) if kind == "chordal" else angles(sine, cosine).square().sum(-1)
    n = max(old_a.shape[-1], old_c.shape[-1])
    old_a, new_a = (a.expand(*a.shape[:-1], n) for a in (old_a, new_a))
    return (_simplified if kind == "simplified" else _aligned)(old_a, old_c, new_a, new_c)


def output_distance(
    old_a: Tensor, old_c: Tensor, old_b: Tensor, new_a: Tensor, new_c: Tensor, new_b: Tensor, raw: bool
) -> Tensor:
    """Energy of the difference of the impulse responses of states [..., n], soft-normalised if raw, through float64."""
    states = [value.double() for value in (old_a, old_c, old_b, new_a, new_c, new_b)]
    a, c, b, x, d, g = (torch.tanh(value / 2) for value in states) if raw else states
    a, x = (pole.expand_as(c) for pole in (a, x))
    poles, residues = torch.cat((a, x), dim=-1), torch.cat((-c * b, d * g), dim=-1)
    return (_outer(residues, residues) / (1 - _outer(poles, poles))).sum((-2, -1)).clamp_min(0).to(old_a.dtype)


def _martin(a: Tensor, b: Tensor) -> Tensor:
    d = a - b
    ratio = _outer(d, d) / ((1 - _outer(a, a)) * (1 - _outer(b, b)))
    return ratio.log1p().sum((-2, -1))


def _simplified(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    trace_old, trace_new = ((v * v / (1 - p * p)).sum(-1) for p, v in ((a, c), (b, d)))
    value = 1 - _overlap(a, c, b, d) / (trace_old * trace_new)
    equal = (torch.isclose(a, b) & torch.isclose(c, d)).all(-1)
    return torch.where(equal, 0.0, value)


def _aligned(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    # Near equality the value is the small difference of two numbers near 1: float64 keeps it.
    wide = [value.double() for value in (a, c, b, d)]
    old, new = wide[:2], wide[2:]
    cosine = _overlap(*old, *new) / (_overlap(*old, *old) * _overlap(*new, *new)).sqrt()
    return (1 - cosine).to(a.dtype)


def _overlap(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """tr(G G^T) of the cross-Gram G_ij = c_i d_j / (1 - a_i b_j)."""
    return ((_outer(c, d) / (1 - _outer(a, b))) ** 2).sum((-2, -1))


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)
