"""Distances between observability subspaces: functions of the poles only (docs/reference/maths.md, section 4).

For distinct poles and no zero in c the subspace is spanned by the sequences ``(1, a_i, a_i^2, ...)``. Repeated poles
are the limit (``t a^(t-1)`` joins the span), which every formula here takes without a special case.

Subspaces of different dimensions (Ye and Lim, 2016): a distance of the n principal angles between one of dimension n
and one of dimension m > n is that of the smaller subspace to the nearest one of its dimension inside the larger. It is
0 exactly where the larger contains the smaller, so it is no metric; with a right angle counted for every missing
dimension it is one. The part of the smaller subspace outside the larger one is the Blaschke product of all m poles of
the larger system, taken at the transition of the smaller one: the lattice of `lattice.py` with n wires that cross m.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.checks import compute_dtype, expect_shape
from infssm.ops.distances._matrices import abs2
from infssm.ops.distances._pair import RAW_LIMIT, Pair, nan_outside, states_first
from infssm.ops.distances.lattice import angles, cells, cross, square_lattice, squared_arc
from infssm.ops.distances.pieces import in_pieces
from infssm.ops.distances.table import kind

KINDS_OF_ANGLES = ("martin", "fubini-study", "binet-cauchy", "chordal", "geodesic")

_of_subspaces = partial(kind, sees="a", unchanged_by="any change of coordinates of the state, and all of c")


@_of_subspaces(
    "martin",
    backends=("triton",),
    summary="-log prod cos^2 of the principal angles between all that the layers can output (Martin 2000)",
)
@in_pieces
def martin(pair: Pair) -> Tensor:
    """``-log prod cos^2 theta_i = sum_ij log1p(conj(d_i) d_j / ((conj(r_i) + r_j) (conj(s_i) + s_j)))``, d = s - r.

    No determinant, no inverse, and no cancellation near equality (eq. 13).
    """
    r, s, shift = pair.sorted().poles()
    later = [_later(x) for x in (r, s, shift)]
    x = shift.conj() * later[2] / ((r.conj() + later[0]) * (s.conj() + later[1]))
    # Re log1p(x); the first row holds the pairs (i, i).
    rows = (torch.log1p(2 * x.real + abs2(x)) / 2 if x.is_complex() else torch.log1p(x)).sum(1)
    n = len(r)
    total = 2 * rows.sum(0) - rows[0] - (rows[n // 2] if n % 2 == 0 else 0)
    return total.clamp_min(0)


@_of_subspaces(
    "fubini-study", backends=("triton",), summary="arccos^2 of the product of the cosines of the principal angles"
)
def fubini_study(pair: Pair) -> Tensor:
    """``arccos(prod cos theta_i)^2`` (eq. 14)."""
    return squared_arc(martin(pair))


@_of_subspaces(
    "binet-cauchy", backends=("triton",), summary="1 - the product of the squared cosines of the principal angles"
)
def binet_cauchy(pair: Pair) -> Tensor:
    """``1 - prod cos^2 theta_i`` (eq. 14)."""
    return -torch.expm1(-martin(pair))


@_of_subspaces(
    "chordal",
    backends=(),
    summary="2 sum sin^2 of the principal angles: the paper's loss before it is simplified",
)
@in_pieces
def chordal(pair: Pair) -> Tensor:
    """``2 n - 2 |S^T S'|_F^2 = 2 sum sin^2 theta_i`` (eq. 15), the scale of the paper."""
    sine, _ = square_lattice(*pair.sorted().poles())
    return 2 * abs2(sine).sum((-2, -1))


@_of_subspaces(
    "geodesic",
    backends=(),
    summary="sum of the squared principal angles: the length of the shortest path between the subspaces",
)
@in_pieces
def geodesic(pair: Pair) -> Tensor:
    """``sum theta_i^2`` (eq. 15)."""
    return angles(*square_lattice(*pair.sorted().poles())).square().sum(-1)


def _later(x: Tensor) -> Tensor:
    """``x_(i+k)`` with the index taken modulo n, ``[n, ...] -> [n // 2 + 1, n, ...]``.

    Rows k of a Hermitian matrix that stand for all of it: row n / 2 of an even n holds its pairs twice.
    """
    n = len(x)
    return torch.cat([x, x[: n // 2]]).unfold(0, n, 1).movedim(-1, 1)


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


def rotation_lattice(old_a: Tensor, new_a: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices ``sine, cosine [..., n, n]`` whose singular values are the sines and cosines of the principal angles.

    old_a, new_a: ``[..., n]`` poles inside the unit disc, ordered so that those of equal index are close: only
    precision depends on the order. ``sine sine^H + cosine cosine^H = 1``. Differentiable in both.
    """
    expect_shape("new_a", new_a, old_a.shape)
    if old_a.shape[-1] == 0:
        raise ConfigError("rotation_lattice: the systems have no poles (n = 0); there is nothing to compare")
    dtype = compute_dtype(old_a, new_a)
    sine, cosine = square_lattice(*Pair(old_a, old_a, new_a, new_a).poles())
    return sine.to(dtype), cosine.to(dtype)


def principal_angles(old_a: Tensor, new_a: Tensor) -> Tensor:
    """Angles between the subspaces, largest first: ``[..., n], [..., m] -> [..., min(n, m)]``, poles in any order.

    Small ones come from their sines and large ones from their cosines, so all keep their precision.
    """
    if old_a.shape[-1] != new_a.shape[-1]:
        return angles(*rectangular_lattice(old_a, new_a)).to(compute_dtype(old_a, new_a).to_real())
    pair = Pair(old_a, old_a, new_a, new_a).sorted()
    return angles(*rotation_lattice(pair.old_a, pair.new_a))
