"""Causal depthwise convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import power_of_two, run, turned

if TYPE_CHECKING:
    from infssm.ops.conv import ConvInputs

_ROWS, _COLS = 16, 128


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Pieces of tokens over all of the batch, programs, and constants of the kernels."""
    batch, tokens, channels = x.shape
    cols = min(_COLS, power_of_two(channels))
    parts = batch * -(-tokens // _ROWS)
    return parts, parts * -(-channels // cols), {"WIDTH": weight.shape[1], "ROWS": _ROWS, "COLS": cols, "warps": 4}


def forward(inputs: ConvInputs, y: Tensor) -> None:
    """Fill y."""
    from infssm.ops.triton.kernels.conv import forward as kernel

    x, weight, bias, silu, reverse, seq_idx = inputs
    _, programs, constants = _sizes(x, weight)
    tensors = (x, turned(weight), bias, seq_idx, y, *x.stride()[:2], *x.shape[1:])
    run(kernel, programs, y, *tensors, SILU=silu, REVERSE=reverse, **constants)


def backward(inputs: ConvInputs, grad: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    """Fill the gradients."""
    from infssm.ops.triton.kernels.conv import backward as kernel

    x, weight, bias, silu, reverse, seq_idx = inputs
    parts, programs, constants = _sizes(x, weight)
    before = new(x, *x.shape)
    weight_parts = new(x, parts, *dweight.mT.shape)
    bias_parts = None if dbias is None else new(x, parts, *dbias.shape)
    run(
        *(kernel, programs, x, x, turned(weight), bias, seq_idx, grad, before, weight_parts, bias_parts),
        *(*x.stride()[:2], *grad.stride()[:2], *x.shape[1:]),
        SILU=silu,
        REVERSE=reverse,
        **constants,
    )
    dweight.copy_(weight_parts.sum(0).mT)
    if dbias is not None and bias_parts is not None:
        torch.sum(bias_parts, 0, out=dbias)
    forward(inputs._replace(x=before, bias=None, silu=False, reverse=not reverse), dx)
