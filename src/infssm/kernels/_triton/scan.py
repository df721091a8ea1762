"""The selective scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, given, needed, new
from infssm.kernels._ops.scan import _INPUTS, _scan_backward_outputs, _scan_setup
from infssm.kernels._triton._launch import CHUNK, DEVICES, Cut, rows_of, run, turned


def _scan_fake(*args: Any) -> tuple[Tensor, ...]:
    u, _, _, B, *_, last, states, save = args
    batch, tokens, channels = u.shape
    groups, n = B.shape[2:]
    return (
        new(u, batch, tokens, channels),
        new(u, batch, channels, n) if last else new(u, 0),
        new(u, batch, tokens, groups, n) if states else new(u, 0),
        new(u, batch, tokens, groups) if states else new(u, 0),
        new(u, batch, tokens, groups, n) if states == 2 else new(u, 0),
        new(u, batch, -(-tokens // CHUNK), n, channels) if save else new(u, 0),
    )


def _inputs(*tensors: Any) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], Cut]:
    """The tensors u ... delta_bias as the kernels read them, the strides of [batch, tokens(, groups)], and the cut."""
    u, delta, A, B, C, D, z, bias = tensors
    u, delta, B, C = (rows_of(tensor) for tensor in (u, delta, B, C))
    z = None if z is None else rows_of(z)
    strides = [tensor.stride()[:-1] for tensor in (u, delta, u if z is None else z, B, C)]
    cut = Cut(u.shape[0], u.shape[1], B.shape[2], u.shape[2], A.shape[1])
    return (u, delta, turned(A), B, C, flat(D), z, flat(bias)), tuple(sum(strides, ())), cut


def _scan(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.scan import forward

    initial, softplus, reverse, *_ = args[8:]
    tensors, strides, cut = _inputs(*args[:8])
    y, last, *means, boundary = outputs = _scan_fake(*args)
    end = new(y, *last.mT.shape) if last.numel() else None
    sums = [new(y, cut.blocks, *mean.shape) if mean.numel() else None for mean in means]
    run(
        *(forward, cut.programs, y, *tensors, turned(initial), y, end, given(boundary), *sums, *strides, *cut.sizes),
        SOFTPLUS=softplus,
        REVERSE=reverse,
        CHUNK=CHUNK,
        **cut.constants,
    )
    for mean, part in zip(means, sums, strict=True):
        if part is not None:
            torch.sum(part, 0, out=mean).div_(cut.size)
    if end is not None:
        last.copy_(end.mT)
    return outputs


def _scan_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, saved = ctx.saved_tensors
    result = scan_backward(*tensors, *ctx.options, saved, *grads[:5])
    return (*needed(ctx, result), None, None, None, None, None)


def _scan_backward(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.scan_backward import backward

    _, softplus, reverse, boundary, grad_y, grad_last, *grad_means = args[8:]
    tensors, strides, cut = _inputs(*args[:8])
    du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = outputs = _scan_backward_outputs(*args)
    grad_y = torch.zeros_like(du) if grad_y is None else rows_of(grad_y)
    history = new(du, cut.programs, CHUNK, cut.states, cut.columns)
    # Sums over batch and blocks of channels are added up in a second step and a fixed order.
    by_batch = [new(du, cut.batch, *grad.shape) if grad.numel() else None for grad in (dA.mT, dD, dbias)]
    by_block = [new(du, cut.blocks, *grad.shape) for grad in (dB, dC)]
    start = new(du, cut.batch, *dA.mT.shape)
    run(
        *(backward, cut.programs, du, *tensors, boundary.contiguous(), history, grad_y, turned(given(grad_last))),
        *(flat(given(grad)) for grad in grad_means),
        *(du, ddelta, *by_block, given(dz), *by_batch, start, *strides, *grad_y.stride()[:2], *cut.sizes),
        SOFTPLUS=softplus,
        REVERSE=reverse,
        CHUNK=CHUNK,
        **cut.constants,
    )
    for grad, part in zip((dA.mT, dD, dbias, dB, dC), (*by_batch, *by_block), strict=True):
        if part is not None:
            grad.copy_(part.sum(0))
    if dinitial.numel():
        dinitial.copy_(start.mT)
    return outputs


scan = define(
    f"triton_scan({_INPUTS}, Tensor? initial_state, bool softplus, bool reverse, bool last, int states, bool save)"
    " -> (Tensor y, Tensor last, Tensor a, Tensor delta, Tensor zoh, Tensor saved)",
    _scan,
    _scan_fake,
    DEVICES,
)
scan_backward = define(
    f"triton_scan_backward({_INPUTS}, bool initial, bool softplus, bool reverse, Tensor saved, Tensor? grad_y,"
    " Tensor? grad_last, Tensor? grad_a, Tensor? grad_delta, Tensor? grad_zoh)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    _scan_backward_outputs,
    DEVICES,
)
differentiate("triton_scan", _scan_autograd, _scan_setup)
