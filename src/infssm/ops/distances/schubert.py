"""Distances between observability subspaces of different dimensions (docs/reference/maths.md, section 4).

Ye and Lim (2016): between a subspace of dimension n and one of dimension m > n, a distance of the n principal angles is
that of the smaller subspace to the nearest one of its dimension inside of the larger. It is 0 exactly where the larger
contains the smaller, so it is no metric; with a right angle counted for every missing dimension it is one.

The part of the smaller subspace outside the larger one is the Blaschke product of all m poles of the larger system,
taken at the transition of the smaller one: the lattice of `lattice.py` with n wires that cross m wires.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.arc import squared_arc
from infssm.ops.checks import compute_dtype
from infssm.ops.distances._matrices import abs2
from infssm.ops.distances._pair import RAW_LIMIT, nan_outside, states_first
from infssm.ops.distances.lattice import angles, cells, cross

KINDS_OF_ANGLES = ("martin", "fubini-study", "binet-cauchy", "chordal", "geodesic")


def schubert_distance(
    old_a: Tensor, new_a: Tensor, *, kind: str, soft_normalize: bool = False, count_missing: bool = False
) -> Tensor:
    """Squared distance of systems with n and m poles, ``[...]``; old_a: ``[..., n]``; new_a: ``[..., m]``.

    The leading dimensions are equal. count_missing: count each missing dimension as a right angle, for `chordal` and
    `geodesic`. With the others one right angle makes the distance infinite or 1, whatever the other angles are.
    """
    if count_missing and kind not in ("chordal", "geodesic"):
        raise ConfigError(
            f"distance: count_missing=True needs kind='chordal' or 'geodesic'; {kind!r} has the same value for all "
            "subspaces with a right angle between them"
        )
    dtype = compute_dtype(old_a, new_a)
    with torch.autocast(old_a.device.type, enabled=False):
        sine, cosine = rectangular_lattice(old_a, new_a, soft_normalize=soft_normalize)
        missing = abs(old_a.shape[-1] - new_a.shape[-1]) if count_missing else 0
        if kind == "chordal":
            value = 2 * abs2(sine).sum((-2, -1)) + 2 * missing
        elif kind == "geodesic":
            value = angles(sine, cosine).square().sum(-1) + missing * math.pi**2 / 4
        else:
            value = _martin(sine, cosine)
            if kind == "fubini-study":
                value = squared_arc(value)
            elif kind == "binet-cauchy":
                value = -torch.expm1(-value)
    return value.to(dtype.to_real() if dtype.is_complex else dtype)


def rectangular_lattice(old_a: Tensor, new_a: Tensor, *, soft_normalize: bool = False) -> tuple[Tensor, Tensor]:
    """``sine [..., k, k]`` and ``cosine [..., k, l]`` of k = min(n, m) angles, l = max(n, m)."""
    small, large = (old_a, new_a) if old_a.shape[-1] <= new_a.shape[-1] else (new_a, old_a)
    a, b = states_first(small, large)
    if soft_normalize and not a.is_complex() and not b.is_complex():
        a, b = (x.masked_fill(x.detach().abs() > RAW_LIMIT, torch.nan) for x in (a, b))
        r, s = torch.exp(-a), torch.exp(-b)
        gap = r.unsqueeze(1) * torch.expm1(a.unsqueeze(1) - b.unsqueeze(0))
    else:
        r, s = (nan_outside((1 - x) / (1 + x)) for x in (a, b))
        gap = 2 * (a.unsqueeze(1) - b.unsqueeze(0)) / ((1 + a).unsqueeze(1) * (1 + b).unsqueeze(0))
    return cross(*cells(r, s, gap))


def _martin(sine: Tensor, cosine: Tensor) -> Tensor:
    """``-log prod cos^2 theta_i``: of small angles from their sines, of large ones from their cosines."""
    sines, cosines = torch.linalg.svdvals(sine), torch.linalg.svdvals(cosine).flip(-1)
    small = sines.square() < 0.5
    near = -torch.log1p(-torch.where(small, sines, 0).square())
    far = -2 * torch.log(torch.where(small, 1, cosines))
    return torch.where(small, near, far).sum(-1)
