"""Causal depthwise convolution with bias and SiLU in the layout of the scan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.ops.backend import choose, in_float32, is_plain
from infssm.ops.checks import expect_floats, expect_rank, expect_shape
from infssm.ops.library import arguments, asked_for, define, flat, given, keep, kept, native, new, rows
from infssm.ops.packing import segment_ids
from infssm.ops.triton import conv as _triton


class ConvInputs(NamedTuple):
    """The inputs of a causal convolution.

    x: [batch, tokens, channels]; weight: [channels, width]; bias: [channels]; seq_idx: [batch, tokens] as of the scan:
    no tap reaches into another sequence.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True
    reverse: bool = False
    seq_idx: Tensor | None = None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Convolve each channel over its past tokens (`reverse`: its future tokens), then SiLU.

    x: [batch, tokens, channels], any strides; weight: [channels, width]; bias: [channels].
    weight[:, -1] multiplies the token itself. Returns [batch, tokens, channels].
    seq_idx: [batch, tokens], for rows that hold several sequences: no tap reaches over a change of the number.
    """
    if not is_plain((x, weight, bias)):
        expect_floats(("x", "weight", "bias"), (x, weight, bias))
    chosen = choose(backend, x, weight, bias)
    if chosen != "cpu":  # the compiled module checks the shapes itself
        expect_rank("x", x, "batch, tokens, channels")
        expect_rank("weight", weight, "channels, width")
        expect_shape("weight", weight, (x.shape[2], weight.shape[1]))
        expect_shape("bias", bias, (x.shape[2],))
        expect_shape("seq_idx", seq_idx, x.shape[:2])
    if seq_idx is not None:
        seq_idx = segment_ids(seq_idx)
    if chosen == "reference":
        return _reference(ConvInputs(x, weight, bias, silu, reverse, seq_idx))
    y: Tensor = conv(*in_float32((x, weight, bias)), silu, reverse, seq_idx, chosen == "triton")
    return y if x.dtype is torch.float32 else y.to(x.dtype)


def _reference(inputs: ConvInputs) -> Tensor:
    x, weight, bias, silu, reverse, seq_idx = inputs
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for k, tap in enumerate(weight.unbind(1)):
        y = y + tap * _shifted(x, weight.shape[1] - 1 - k, reverse, seq_idx)
    return F.silu(y) if silu else y


def _shifted(x: Tensor, back: int, reverse: bool, seq_idx: Tensor | None) -> Tensor:
    """For each token the one ``back`` before (reverse: after) it; 0 where that is not in its sequence."""
    moved = _move(x.mT, back, reverse, 0.0).mT
    if seq_idx is None or back == 0:
        return moved
    return moved * (_move(seq_idx, back, reverse, -1.0) == seq_idx).unsqueeze(-1)


def _move(x: Tensor, back: int, reverse: bool, fill: float) -> Tensor:
    """Move [..., tokens] by ``back`` tokens, away from the first (reverse: from the last)."""
    tokens = x.shape[-1]
    return F.pad(x, (0, back), value=fill)[..., back:] if reverse else F.pad(x, (back, 0), value=fill)[..., :tokens]


def _output(x: Tensor, *_: Any) -> Tensor:
    return new(x, *x.shape)


def _readable(args: tuple[Any, ...]) -> ConvInputs:
    x, weight, bias, silu, reverse, seq_idx = args[: len(ConvInputs._fields)]
    return ConvInputs(rows(x), weight.contiguous(), flat(bias), silu, reverse, seq_idx)


def _kernel(*args: Any) -> Tensor:
    y = new(args[0], *args[0].shape)
    if args[-1]:
        _triton.forward(_readable(args), y)
    else:
        native.conv_forward(_readable(args), y, torch.get_num_threads())
    return y


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (*inputs, triton), _ = kept(ctx)
    return asked_for(ctx, conv_backward(*inputs, grad, triton))


def _input_grads(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return new(x, *x.shape), new(x, *weight.shape), new(x, weight.shape[0] if bias is not None else 0)


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    found = _input_grads(*args)
    dx, dweight, dbias = map(given, found)
    grad, triton = rows(args[-2]), args[-1]
    if triton:
        _triton.backward(_readable(args), grad, dx, dweight, dbias)
    else:
        native.conv_backward(_readable(args), grad, dx, dweight, dbias, torch.get_num_threads(), False)
    return found


conv_backward = define(
    f"conv_backward({arguments(ConvInputs)}, Tensor grad, bool triton) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _input_grads,
)
conv = define(
    f"conv({arguments(ConvInputs)}, bool triton) -> Tensor",
    _kernel,
    _output,
    setup=lambda ctx, inputs, _: keep(ctx, inputs),
    backward=_backward,
)
