"""Distances between observability subspaces: functions of the poles alone.

For distinct poles and no zero in c the subspace is spanned by the sequences ``(1, a_i, a_i^2, ...)``. Repeated poles
are the limit (``t a^(t-1)`` joins the span), which every formula here takes without a special case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infssm import kernels
from infssm.geometry._chunks import per_token
from infssm.geometry._fused import compiled, fused
from infssm.geometry._pairwise import abs2, states_first
from infssm.geometry._registry import register_distance
from infssm.geometry._space import StateSpace
from infssm.geometry._validate import check_pair
from infssm.kernels.arc import squared_arc


@register_distance("martin")
@fused("martin")
@per_token
def martin(old: StateSpace, new: StateSpace) -> Tensor:
    """``-log prod cos^2 theta_i = sum_ij log1p(conj(d_i) d_j / ((1 - conj(a_i) a_j) (1 - conj(b_i) b_j)))``.

    Here d = a - b: no determinant, no inverse, and no cancellation near equality.
    """
    a, b = states_first(*paired(old.a, new.a))
    x = _each_pair_once(a - b) / ((1 - _each_pair_once(a)) * (1 - _each_pair_once(b)))
    # Re log1p(x); the first row holds the pairs (i, i).
    rows = (torch.log1p(2 * x.real + abs2(x)) / 2 if x.is_complex() else torch.log1p(x)).sum(1)
    n = len(a)
    total = 2 * rows.sum(0) - rows[0] - (rows[n // 2] if n % 2 == 0 else 0)
    return total.clamp_min(0)


@register_distance("fubini-study")
@fused("fubini-study")
def fubini_study(old: StateSpace, new: StateSpace) -> Tensor:
    """``arccos(prod cos theta_i)^2``."""
    return squared_arc(martin(old, new))


@register_distance("binet-cauchy")
@fused("binet-cauchy")
def binet_cauchy(old: StateSpace, new: StateSpace) -> Tensor:
    """``1 - prod cos^2 theta_i``."""
    return -torch.expm1(-martin(old, new))


@register_distance("chordal")
@fused("chordal")
@per_token
def chordal(old: StateSpace, new: StateSpace) -> Tensor:
    """``2 n - 2 |S^T S'|_F^2 = 2 sum sin^2 theta_i``, the scale of the paper."""
    sine, _ = kernels.rotation_lattice(*paired(old.a, new.a), backend="reference")
    return 2 * abs2(sine).sum((-2, -1))


@register_distance("geodesic")
@fused("geodesic")
@per_token
def geodesic(old: StateSpace, new: StateSpace) -> Tensor:
    """``sum theta_i^2``."""
    return _angles(old, new).square().sum(-1)


def principal_angles(old: StateSpace, new: StateSpace) -> Tensor:
    """Principal angles between the two observability subspaces, largest first.

    Small angles come from their sines and large ones from their cosines, so all keep their precision. A scalar
    transition ``a I`` has observability of rank 1, hence one angle.

    Args:
        old: ``a [..., n]``.
        new: ``a [..., n]``.

    Returns:
        ``[..., n]`` in [0, pi/2].
    """
    check_pair(old, new)
    return _angles(old, new)


def _angles(old: StateSpace, new: StateSpace) -> Tensor:
    backend = None if compiled(old.a, new.a) else "reference"
    return kernels.principal_angles(*paired(old.a, new.a), backend=backend)


def _each_pair_once(x: Tensor) -> Tensor:
    """``conj(x_i) x_(i+k)`` with the index taken modulo n, ``[n, ...] -> [n // 2 + 1, n, ...]``.

    Rows k of a Hermitian matrix that stand for all of it: row n / 2 of an even n holds its pairs twice.
    """
    n = len(x)
    later = torch.cat([x, x[: n // 2]]).unfold(0, n, 1).movedim(-1, 1)
    return x.conj() * later


def paired(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Reorder the poles ``[..., n]`` of both systems so that those of equal index are close.

    No result depends on the order, but differences of near poles keep digits that those of far ones lose.
    """
    shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    a, b = a.expand(shape), b.expand(shape)
    if not a.is_complex():
        return a.sort(dim=-1).values, b.sort(dim=-1).values
    x, y = _lexicographic(a), _lexicographic(b)
    better = ((x - y).abs().square().sum(-1) < (a - b).abs().square().sum(-1)).unsqueeze(-1)
    return torch.where(better, x, a), torch.where(better, y, b)


def _lexicographic(a: Tensor) -> Tensor:
    """Sorted by imaginary, then real part."""
    a = a.gather(-1, a.real.sort(dim=-1, stable=True).indices)
    return a.gather(-1, a.imag.sort(dim=-1, stable=True).indices)
