"""Residual addition and RMSNorm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infssm.ops.triton._launch import add_up, parts_of, power_of_two, run

# Rows whose share of the gradient of the weight one program adds up.
_ROWS = 32


def forward(x: Any, residual: Any, weight: Any, eps: float, normed: Any, total: Any, scale: Any) -> None:
    """Fill the outputs that are not None; all tensors without gaps."""
    from infssm.ops.triton.kernels.norm import forward as kernel

    cols = power_of_two(x.shape[-1])
    found = {"x": x, "residual": residual, "weight": weight, "normed": normed, "total": total, "scale": scale}
    sizes = {"channels": x.shape[-1], "eps": eps, "COLS": cols}
    run(kernel, scale.numel(), normed, found, sizes, warps=min(16, max(1, cols // 256)))


def backward(
    total: Any, weight: Any, scale: Any, grad_normed: Any, grad_total: Any, dx: Tensor, dweight: Tensor
) -> None:
    """Fill the gradients; all tensors without gaps."""
    from infssm.ops.triton.kernels.norm import backward as kernel

    rows, cols = scale.numel(), power_of_two(weight.shape[0])
    parts = -(-rows // _ROWS)
    of_weight = parts_of(dweight, parts)
    found = {"total": total, "weight": weight, "scale": scale, "grad_normed": grad_normed, "grad_total": grad_total}
    sizes = {"rows": rows, "channels": weight.shape[0], "ROWS": _ROWS, "COLS": cols}
    run(kernel, parts, dx, found, {"dx": dx, "dweight": of_weight}, sizes, warps=min(16, max(1, cols // 256)))
    add_up(dweight, of_weight)
