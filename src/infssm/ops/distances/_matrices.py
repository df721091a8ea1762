"""Matrices over pairs of states, ``[n, n, ...]``: the systems come last, so that every operation runs along them."""

from __future__ import annotations

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor) -> Tensor:
    """``conj(x_i) + y_j``: ``[n, ...], [m, ...] -> [n, m, ...]``."""
    return x.conj().unsqueeze(1) + y.unsqueeze(0)


def cauchy(x: Tensor, y: Tensor) -> Tensor:
    """``1 / (conj(x_i) + y_j)``: ``[n, ...], [m, ...] -> [n, m, ...]``."""
    return torch.reciprocal(add(x, y))


def gaps(x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """``y_j - x_i``: ``[n, ...], [n, ...] -> [n, n, ...]``; the diagonal is ``shift``, which has its own precision."""
    diagonal = torch.eye(len(x), dtype=torch.bool, device=x.device).reshape(len(x), len(x), *[1] * (x.ndim - 1))
    return torch.where(diagonal, shift.unsqueeze(0), y.unsqueeze(0) - x.unsqueeze(1))


def dagger(matrix: Tensor) -> Tensor:
    """Conjugate transpose: ``[n, m, ...] -> [m, n, ...]``."""
    return matrix.transpose(0, 1).conj()


def form(x: Tensor, matrix: Tensor, y: Tensor) -> Tensor:
    """Real part of ``x^H matrix y``: ``[n, ...], [n, m, ...], [m, ...] -> [...]``."""
    return real((x.conj() * (matrix * y.unsqueeze(0)).sum(1)).sum(0))


def abs2(x: Tensor) -> Tensor:
    """``|x|^2``, real."""
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def real(x: Tensor) -> Tensor:
    """Real part, of real tensors too."""
    return x.real if x.is_complex() else x
