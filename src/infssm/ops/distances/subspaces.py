"""Distances between observability subspaces: functions of the poles alone (docs/reference/maths.md, section 4).

For distinct poles and no zero in c the subspace is spanned by the sequences ``(1, a_i, a_i^2, ...)``. Repeated poles
are the limit (``t a^(t-1)`` joins the span), which every formula here takes without a special case.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from infssm.ops.arc import squared_arc
from infssm.ops.distances._matrices import abs2
from infssm.ops.distances._pair import Pair
from infssm.ops.distances.lattice import angles, rotation_lattice
from infssm.ops.distances.pieces import in_pieces
from infssm.ops.distances.table import kind

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
    sine, _ = rotation_lattice(*pair.sorted().poles())
    return 2 * abs2(sine).sum((-2, -1))


@_of_subspaces(
    "geodesic",
    backends=(),
    summary="sum of the squared principal angles: the length of the shortest path between the subspaces",
)
@in_pieces
def geodesic(pair: Pair) -> Tensor:
    """``sum theta_i^2`` (eq. 15)."""
    return angles(*rotation_lattice(*pair.sorted().poles())).square().sum(-1)


def _later(x: Tensor) -> Tensor:
    """``x_(i+k)`` with the index taken modulo n, ``[n, ...] -> [n // 2 + 1, n, ...]``.

    Rows k of a Hermitian matrix that stand for all of it: row n / 2 of an even n holds its pairs twice.
    """
    n = len(x)
    return torch.cat([x, x[: n // 2]]).unfold(0, n, 1).movedim(-1, 1)
