"""Gram matrices of infinite observability matrices, ``G(x, y) = O_x^H O_y``."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError

_MAX_DOUBLINGS = 64


def gram(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """Cross-Gram ``G_ij = conj(c_i) d_j / (1 - conj(a_i) b_j)`` of two diagonal systems x = (a, c) and y = (b, d).

    It is ``sum_t (A_x^H)^t C_x^H C_y A_y^t``, the solution of ``A_x^H G A_y - G = -C_x^H C_y``.

    Args:
        a: ``[..., n]`` poles of x inside the unit disc (``[..., 1]`` for a scalar transition).
        c: ``[..., n]`` output row of x.
        b: ``[..., m]`` poles of y inside the unit disc.
        d: ``[..., m]`` output row of y.

    Returns:
        ``[..., n, m]``.
    """
    return c.conj().unsqueeze(-1) * d.unsqueeze(-2) / (1 - a.conj().unsqueeze(-1) * b.unsqueeze(-2))


def gram_dense(A: Tensor, C: Tensor, B: Tensor, D: Tensor) -> Tensor:
    """Cross-Gram of two systems with full transition matrices, x = (A, C) and y = (B, D).

    Solves ``A^H G B - G = -C^H D`` by doubling: ``G <- G + A^H G B, A <- A^2, B <- B^2``, which converges
    quadratically. Differentiable and batched; O(n^3) per doubling.

    Args:
        A: ``[..., n, n]`` with spectral radius below 1.
        C: ``[..., p, n]`` output matrix, or ``[..., n]`` for one output.
        B: ``[..., m, m]`` with spectral radius below 1.
        D: ``[..., p, m]`` or ``[..., m]``.

    Returns:
        ``[..., n, m]``.
    """
    _check_stable(A, "A")
    _check_stable(B, "B")
    C = C.unsqueeze(-2) if C.ndim == A.ndim - 1 else C
    D = D.unsqueeze(-2) if D.ndim == B.ndim - 1 else D
    if C.shape[-1] != A.shape[-1] or D.shape[-1] != B.shape[-1] or C.shape[-2] != D.shape[-2]:
        shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in {"A": A, "C": C, "B": B, "D": D}.items())
        raise ConfigError(f"gram_dense: shapes do not fit [n, n], [p, n], [m, m], [p, m]: {shapes}")
    total = C.mH @ D
    left, right = A.mH, B
    for _ in range(_MAX_DOUBLINGS):
        step = left @ total @ right
        total = total + step
        if not bool((_norm(step) > torch.finfo(total.dtype).eps * _norm(total) / 4).any()):
            return total
        left, right = left @ left, right @ right
    raise ConfigError("gram_dense: no convergence; A or B is too close to spectral radius 1 for this precision")


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(x.detach())
    return norm


def _check_stable(A: Tensor, name: str) -> None:
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ConfigError(f"gram_dense: {name} must be square [..., n, n], got {tuple(A.shape)}")
    if not bool(torch.isfinite(A.detach().abs()).all()):
        raise ConfigError(f"gram_dense: {name} holds a NaN or infinite value")
    radius = float(torch.linalg.eigvals(A.detach()).abs().max()) if A.numel() else 0.0
    if radius >= 1:
        raise ConfigError(f"gram_dense: {name} is unstable, spectral radius {radius:.6g} >= 1; scale it below 1")
