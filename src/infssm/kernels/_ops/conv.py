"""Causal depthwise convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, native, needed, new, rows


def _conv_fake(x: Tensor, *_: Any) -> Tensor:
    return new(x, *x.shape)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, reverse: bool) -> Tensor:
    y = _conv_fake(x)
    threads = torch.get_num_threads()
    native.conv_forward(rows(x), flat(weight), flat(bias), silu, reverse, threads, y)
    return y


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _conv_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    result = conv_backward(*ctx.saved_tensors, *ctx.options, grad)
    return (*needed(ctx, result), None, None)


def _conv_backward_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return new(x, *x.shape), new(x, *weight.shape), new(x, weight.shape[0] if bias is not None else 0)


def _conv_backward(*args: Any) -> tuple[Tensor, ...]:
    x, weight, bias, silu, reverse, grad = args
    dx, dweight, dbias = outputs = _conv_backward_fake(*args)
    native.conv_backward(
        *(rows(x), flat(weight), flat(bias), silu, reverse, torch.get_num_threads(), rows(grad)),
        *(dx, dweight, None if bias is None else dbias),
    )
    return outputs


conv = define(
    "conv(Tensor x, Tensor weight, Tensor? bias, bool silu, bool reverse) -> Tensor",
    _conv,
    _conv_fake,
)
conv_backward = define(
    "conv_backward(Tensor x, Tensor weight, Tensor? bias, bool silu, bool reverse, Tensor grad)"
    " -> (Tensor, Tensor, Tensor)",
    _conv_backward,
    _conv_backward_fake,
)
differentiate("conv", _conv_autograd, _conv_setup)
