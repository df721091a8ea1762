"""Causal depthwise convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import add_up, parts_of, power_of_two, run, strides, turned

if TYPE_CHECKING:
    from infssm.ops.conv import ConvInputs

_ROWS, _COLS, _WARPS = 16, 128, 4


def _arguments(inputs: ConvInputs) -> tuple[int, int, dict[str, Any]]:
    """Pieces of tokens over all of the batch, programs, and what both kernels take."""
    x, weight, bias, silu, reverse, seq_idx = inputs
    batch, tokens, channels = x.shape
    cols = min(_COLS, power_of_two(channels))
    parts = batch * -(-tokens // _ROWS)
    found = {"x": x, "weight": turned(weight), "bias": bias, "seq": seq_idx, "tokens": tokens, "channels": channels}
    found |= {"SILU": silu, "REVERSE": reverse, "WIDTH": weight.shape[1], "ROWS": _ROWS, "COLS": cols}
    return parts, parts * -(-channels // cols), found | strides("x", x)


def forward(inputs: ConvInputs, y: Tensor) -> None:
    """Fill y."""
    from infssm.ops.triton.kernels.conv import forward as kernel

    _, programs, found = _arguments(inputs)
    run(kernel, programs, y, found, {"y": y}, warps=_WARPS)


def backward(inputs: ConvInputs, grad: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    """Fill the gradients."""
    from infssm.ops.triton.kernels.conv import backward as kernel

    count, programs, found = _arguments(inputs)
    before = new(dx, *dx.shape)
    of_weight, of_bias = parts_of(dweight.mT, count), parts_of(dbias, count)
    wanted = {"grad": grad, "before": before, "dweight": of_weight, "dbias": of_bias} | strides("grad", grad)
    run(kernel, programs, dx, found, wanted, warps=_WARPS)
    add_up(dweight.mT, of_weight)
    add_up(dbias, of_bias)
    forward(inputs._replace(x=before, bias=None, silu=False, reverse=not inputs.reverse), dx)
