"""Causal depthwise convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, needed, new
from infssm.kernels._ops.conv import _conv_backward_fake, _conv_fake, _conv_setup
from infssm.kernels._triton._launch import DEVICES, power_of_two, rows_of, run, turned

_ROWS, _COLS = 16, 128


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Pieces of tokens over all of the batch, programs, and constants of the kernels."""
    batch, tokens, channels = x.shape
    cols = min(_COLS, power_of_two(channels))
    parts = batch * -(-tokens // _ROWS)
    return parts, parts * -(-channels // cols), {"WIDTH": weight.shape[1], "ROWS": _ROWS, "COLS": cols, "warps": 4}


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, reverse: bool) -> Tensor:
    from infssm.kernels._triton.kernels.conv import forward

    x = rows_of(x)
    y = _conv_fake(x)
    _, programs, constants = _sizes(x, weight)
    tensors = (x, turned(weight), flat(bias), y, *x.stride()[:2], *x.shape[1:])
    run(forward, programs, y, *tensors, SILU=silu, REVERSE=reverse, **constants)
    return y


def _conv_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    result = conv_backward(*ctx.saved_tensors, *ctx.options, grad)
    return (*needed(ctx, result), None, None)


def _conv_backward(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.conv import backward

    x, weight, bias, silu, reverse, grad = args
    x, grad = rows_of(x), rows_of(grad)
    _, dweight, dbias = _conv_backward_fake(*args)
    parts, programs, constants = _sizes(x, weight)
    before = _conv_fake(x)
    weight_parts, bias_parts = (new(x, parts, *out.shape) if out.numel() else None for out in (dweight.mT, dbias))
    run(
        *(backward, programs, x, x, turned(weight), flat(bias), grad, before, weight_parts, bias_parts),
        *(*x.stride()[:2], *grad.stride()[:2], *x.shape[1:]),
        SILU=silu,
        REVERSE=reverse,
        **constants,
    )
    for out, part in ((dweight.mT, weight_parts), (dbias, bias_parts)):
        if part is not None:
            out.copy_(part.sum(0))
    return _conv(before, weight, None, False, not reverse), dweight, dbias


conv = define(
    "triton_conv(Tensor x, Tensor weight, Tensor? bias, bool silu, bool reverse) -> Tensor",
    _conv,
    _conv_fake,
    DEVICES,
)
conv_backward = define(
    "triton_conv_backward(Tensor x, Tensor weight, Tensor? bias, bool silu, bool reverse, Tensor grad)"
    " -> (Tensor, Tensor, Tensor)",
    _conv_backward,
    _conv_backward_fake,
    DEVICES,
)
differentiate("triton_conv", _conv_autograd, _conv_setup)
