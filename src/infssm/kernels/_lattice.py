"""Sines and cosines of the principal angles between two observability subspaces, from a lattice of rotations.

In the Takenaka-Malmquist basis of the old poles the transition A is a cascade of all-pass sections: orthonormal
whatever the poles, repeated ones included. The part of the old subspace orthogonal to the new one is the Blaschke
product of the new poles taken at A, ``S = prod_k (A - b_k) (1 - conj(b_k) A)^-1``: its singular values are the sines
(Beurling). Each factor is again a cascade, with poles ``(a_i - b_k) / (1 - conj(b_k) a_i)``, so S is a lattice of n^2
two-by-two rotations, one for each pair (a_i, b_k); what leaves it on the other side has the cosines as singular values.
Rotations neither grow nor cancel, and a pair ``a_k = b_k`` passes an exact zero: at equality S is exactly 0, and near
it S keeps its relative precision, in float32 too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_lattice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``sine, cosine [..., n, n]`` of real or complex poles ``[..., n]``; see the public function."""
    n = a.shape[-1]
    old, new = (x.movedim(-1, 0).contiguous() for x in (a, b))  # [n, ...]: every operation runs along the systems
    keep, turn, back = (x.flip(1) for x in _cells(old, new))
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    eye = eye.reshape(n, n, *[1] * (a.ndim - 1)).expand(n, n, *a.shape[:-1])
    down, right = eye[:0], eye[:0]  # signals [cells, n, ...] on the wires of a_i and of b_k
    sine, cosine = [], []
    for step in range(2 * n - 1):  # the cells (i, k) with i + k = step, all at once
        if step < n:
            down = torch.cat([down, eye[step : step + 1]])
            right = torch.cat([torch.zeros_like(eye[:1]), right])
        p, q, r = (x.diagonal(n - 1 - step, 0, 1).movedim(-1, 0).unsqueeze(1) for x in (keep, turn, back))
        down, right = p * down + q * right, q * down + r * right
        if step >= n - 1:
            sine.append(down[0])
            cosine.append(right[-1])
            down, right = down[1:], right[:-1]
    # Stacked on the last axis: row = component of the input, column = wire.
    return torch.stack(sine).movedim((0, 1), (-1, -2)), torch.stack(cosine).movedim((0, 1), (-1, -2))


def angles(sine: Tensor, cosine: Tensor) -> Tensor:
    """The principal angles ``[..., n]``, largest first: small ones from their sines, large ones from their cosines.

    NaN where the matrices are not finite, which the decomposition would refuse for all.
    """
    bad = ~(sine.abs() + cosine.abs()).sum((-2, -1), keepdim=True).isfinite()
    sine, cosine = sine.masked_fill(bad, 0), cosine.masked_fill(bad, 0)
    found = torch.atan2(torch.linalg.svdvals(sine), torch.linalg.svdvals(cosine).flip(-1))
    return found.masked_fill(bad.squeeze(-1), torch.nan)


def _cells(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unitary ``[[keep, turn], [turn, back]]`` of every pair of poles, each ``[n, n, ...]``."""
    old, new = a.unsqueeze(1), b.unsqueeze(0)
    scale, shift = torch.reciprocal(1 - old * new.conj()), old - new
    turn = _defect(old) * _defect(new) * scale
    return shift * scale, turn, -shift.conj() * scale


def _defect(a: Tensor) -> Tensor:
    """``sqrt(1 - |a|^2)``."""
    return (1 - a.real.square() - a.imag.square()).sqrt() if a.is_complex() else ((1 - a) * (1 + a)).sqrt()
