"""Residual addition and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import power_of_two, run

# Rows whose share of the gradient of the weight one program adds up.
_ROWS = 32


def _sizes(channels: int) -> dict[str, int]:
    cols = power_of_two(channels)
    return {"COLS": cols, "warps": min(16, max(1, cols // 256))}


def forward(x: Any, residual: Any, weight: Any, eps: float, normed: Any, total: Any, scale: Any) -> None:
    """Fill the outputs that are not None; all tensors without gaps."""
    from infssm.ops.triton.kernels.norm import forward as kernel

    tensors = (x, residual, weight, normed, total, scale)
    run(kernel, scale.numel(), normed, *tensors, x.shape[-1], eps, **_sizes(x.shape[-1]))


def backward(
    total: Any, weight: Any, scale: Any, grad_normed: Any, grad_total: Any, dx: Tensor, dweight: Tensor
) -> None:
    """Fill the gradients; all tensors without gaps."""
    from infssm.ops.triton.kernels.norm import backward as kernel

    parts = -(-scale.numel() // _ROWS)
    weight_parts = new(dx, parts, *dweight.shape)
    tensors = (total, weight, scale, grad_normed, grad_total, dx, weight_parts)
    sizes = _sizes(weight.shape[0])
    run(kernel, parts, dx, *tensors, scale.numel(), weight.shape[0], ROWS=_ROWS, **sizes)
    torch.sum(weight_parts, 0, out=dweight)
