"""Causal depthwise convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.records import ConvInputs
from infssm.ops.registered.library import arguments, asked_for, define, differentiate, flat, given, native, new, rows
from infssm.ops.triton import conv as _triton


def _output(x: Tensor, *_: Any) -> Tensor:
    return new(x, *x.shape)


def _readable(args: tuple[Any, ...]) -> ConvInputs:
    x, weight, bias, silu, reverse, seq_idx = args[: len(ConvInputs._fields)]
    return ConvInputs(rows(x), flat(weight), flat(bias), silu, reverse, seq_idx)


def _conv(*args: Any) -> Tensor:
    y = _output(*args)
    native.conv_forward(_readable(args), y, torch.get_num_threads())
    return y


def _triton_conv(*args: Any) -> Tensor:
    y = _output(*args)
    _triton.forward(_readable(args), y)
    return y


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, silu, reverse, seq_idx, triton = inputs
    ctx.save_for_backward(x, weight, bias, seq_idx)
    ctx.options = silu, reverse, triton


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, seq_idx = ctx.saved_tensors
    silu, reverse, triton = ctx.options
    result = conv_backward(x, weight, bias, silu, reverse, seq_idx, grad, triton)
    return (*asked_for(ctx, result), None, None, None, None)


def _input_grads(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return new(x, *x.shape), new(x, *weight.shape), new(x, weight.shape[0] if bias is not None else 0)


def _conv_backward(*args: Any) -> tuple[Tensor, ...]:
    found = _input_grads(*args)
    native.conv_backward(_readable(args), rows(args[-2]), *map(given, found), torch.get_num_threads(), False)
    return found


def _triton_backward(*args: Any) -> tuple[Tensor, ...]:
    found = _input_grads(*args)
    _triton.backward(_readable(args), rows(args[-2]), *map(given, found))
    return found


conv = define(f"conv({arguments(ConvInputs)}, bool triton) -> Tensor", _conv, _output, triton=_triton_conv)
conv_backward = define(
    f"conv_backward({arguments(ConvInputs)}, Tensor grad, bool triton) -> (Tensor, Tensor, Tensor)",
    _conv_backward,
    _input_grads,
    triton=_triton_backward,
)
differentiate("conv", _autograd, _setup)
