"""The selective scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops.library import new
from infssm.kernels._triton._launch import CHUNK, Cut, run, turned
from infssm.kernels.records import ScanInputs

__all__ = ["CHUNK", "backward", "forward"]


def _tensors(x: ScanInputs) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], Cut]:
    """The tensors as the kernels take them, the strides of [batch, tokens(, groups)], and the cut."""
    strides = [tensor.stride()[:-1] for tensor in (x.u, x.delta, x.u if x.z is None else x.z, x.B, x.C)]
    cut = Cut(x.u.shape[0], x.u.shape[1], x.B.shape[2], x.u.shape[2], x.A.shape[1])
    tensors = (x.u, x.delta, turned(x.A), x.B, x.C, x.D, x.z, x.delta_bias, x.seq_idx)
    return tensors, tuple(sum(strides, ())), cut


def forward(x: ScanInputs, out: Any) -> None:
    """Fill the outputs that are not None."""
    from infssm.kernels._triton.kernels.scan import forward as kernel

    tensors, strides, cut = _tensors(x)
    end = None if out.last is None else new(out.y, *out.last.mT.shape)
    means = (out.a, out.delta, out.zoh)
    sums = [None if mean is None else new(out.y, cut.blocks, *mean.shape) for mean in means]
    run(
        *(kernel, cut.programs, out.y, *tensors, turned(x.initial_state), out.y, end, out.saved, *sums, *strides),
        *cut.sizes,
        SOFTPLUS=x.delta_softplus,
        REVERSE=x.reverse,
        CHUNK=CHUNK,
        **cut.constants,
    )
    for mean, part in zip(means, sums, strict=True):
        if part is not None:
            torch.sum(part, 0, out=mean).div_(cut.size)
    if end is not None:
        out.last.copy_(end.mT)


def backward(x: ScanInputs, saved: Tensor, grads: Any, found: Any) -> None:
    """Fill the gradients of the inputs that are not None from those of the outputs."""
    from infssm.kernels._triton.kernels.scan_backward import backward as kernel

    tensors, strides, cut = _tensors(x)
    du, dA = found.u, found.A.mT
    history = new(du, cut.programs, CHUNK, cut.states, cut.columns)
    # Sums over batch and blocks of channels are added up in a second step and a fixed order.
    shared = (dA, found.D, found.delta_bias)
    by_batch = [None if grad is None else new(du, cut.batch, *grad.shape) for grad in shared]
    by_block = [new(du, cut.blocks, *grad.shape) for grad in (found.B, found.C)]
    start = new(du, cut.batch, *dA.shape)
    run(
        *(kernel, cut.programs, du, *tensors, saved, history, grads.y, turned(grads.last)),
        *(grads.a, grads.delta, grads.zoh),
        *(du, found.delta, *by_block, found.z, *by_batch, start, *strides, *grads.y.stride()[:2], *cut.sizes),
        SOFTPLUS=x.delta_softplus,
        REVERSE=x.reverse,
        CHUNK=CHUNK,
        **cut.constants,
    )
    for grad, part in zip((*shared, found.B, found.C), (*by_batch, *by_block), strict=True):
        if part is not None:
            grad.copy_(part.sum(0))
    if found.initial_state is not None:
        found.initial_state.copy_(start.mT)
