"""Sines and cosines of the principal angles between two observability subspaces, from a lattice of rotations.

Docs/maths.md, section 4 (eq. 16 to 18). In the Takenaka-Malmquist basis of the old poles the transition A is a cascade
of all-pass sections: orthonormal whatever the poles, repeated ones included. The part of the old subspace orthogonal to
the new one is the Blaschke product of the new poles taken at A, ``S = prod_k (A - b_k) (1 - conj(b_k) A)^-1``: its
singular values are the sines (Beurling). Each factor is again a cascade, so S is a lattice of n^2 two-by-two rotations,
one for each pair (a_i, b_k); what leaves it on the other side has the cosines as singular values. Rotations neither
grow nor cancel, and a pair ``a_k = b_k`` passes an exact zero: at equality S is exactly 0, and near it S keeps its
relative precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.ops.distances._matrices import gaps

# Below this 1 - cos the series of arccos^2 is exact to rounding and has a finite derivative at 0.
_SERIES_RANGE = 1e-2


def square_lattice(r: Tensor, s: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``sine, cosine [..., n, n]`` of half-plane poles r, s and s - r ``[n, ...]``; see `rotation_lattice`."""
    return cross(*cells(r, s, gaps(r, s, shift)))


def cross(keep: Tensor, turn: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """``sine [..., n, n], cosine [..., n, m]`` of the rotations ``[n, m, ...]`` where n wires cross m wires, n <= m."""
    n, m, *lead = keep.shape
    keep, turn, back = (x.flip(1) for x in (keep, turn, back))
    eye = torch.eye(n, dtype=keep.dtype, device=keep.device)
    eye = eye.reshape(n, n, *[1] * len(lead)).expand(n, n, *lead)
    down, right = eye[:0], eye[:0]  # signals [cells, n, ...] on the wires of a_i and of b_k
    sine, cosine = [], []
    for step in range(n + m - 1):  # the cells (i, k) with i + k = step, all at once
        if step < n:
            down = torch.cat([down, eye[step : step + 1]])
        if step < m:
            right = torch.cat([torch.zeros_like(eye[:1]), right])
        p, q, r = (x.diagonal(m - 1 - step, 0, 1).movedim(-1, 0).unsqueeze(1) for x in (keep, turn, back))
        down, right = p * down + q * right, q * down + r * right
        if step >= m - 1:  # the wire of a_i has met every b_k
            sine.append(down[0])
            down = down[1:]
        if step >= n - 1:
            cosine.append(right[-1])
            right = right[:-1]
    # Stacked on the last axis: row = component of the input, column = wire.
    return torch.stack(sine).movedim((0, 1), (-1, -2)), torch.stack(cosine).movedim((0, 1), (-1, -2))


def angles(sine: Tensor, cosine: Tensor) -> Tensor:
    """The principal angles ``[..., n]``, largest first: small ones from their sines, large ones from their cosines.

    NaN where the matrices are not finite, which the decomposition would refuse for all.
    """
    bad = ~(sine.abs().sum((-2, -1), keepdim=True) + cosine.abs().sum((-2, -1), keepdim=True)).isfinite()
    sine, cosine = sine.masked_fill(bad, 0), cosine.masked_fill(bad, 0)
    found = torch.atan2(torch.linalg.svdvals(sine), torch.linalg.svdvals(cosine).flip(-1))
    return found.masked_fill(bad.squeeze(-1), torch.nan)


def cells(r: Tensor, s: Tensor, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unitary ``[[keep, turn], [turn, back]]`` of every pair of poles, each ``[n, m, ...]``; gap: s_k - r_i."""
    scale = torch.reciprocal(r.unsqueeze(1) + s.conj().unsqueeze(0))
    turn = 2 * _root(r).unsqueeze(1) * _root(s).unsqueeze(0) * scale
    return gap * scale, turn, -gap.conj() * scale


def _root(r: Tensor) -> Tensor:
    """Square root of the real part."""
    return (r.real if r.is_complex() else r).sqrt()


def squared_arc(martin: Tensor) -> Tensor:
    """``arccos(exp(-martin / 2))^2``: Fubini-Study from Martin, with a finite derivative at 0."""
    half = martin / 2
    x = -torch.expm1(-half)
    small = x < _SERIES_RANGE
    series = _arccos2_series(torch.where(small, x, 0))
    return torch.where(small, series, torch.arccos(torch.exp(-torch.where(small, 1, half))).square())


def _arccos2_series(x: Tensor) -> Tensor:
    """``arccos(1 - x)^2 = 2 sum_k (2 x)^k / (k^2 binom(2k, k))`` for small x."""
    terms = (1, 1 / 6, 2 / 45, 1 / 70, 8 / 1575, 4 / 2079, 16 / 21021)
    total = torch.zeros_like(x)
    for term in reversed(terms):
        total = total * x + term
    return 2 * x * total
