"""Mean states without a scan."""

from __future__ import annotations

from torch import Tensor

from infssm.kernels._ops.library import new
from infssm.kernels._triton._launch import Cut, run, turned

# Tokens whose share of dA one program adds up.
_ROWS = 64


def forward(
    delta: Tensor,
    A: Tensor,
    bias: Tensor | None,
    groups: int,
    softplus: bool,
    a: Tensor,
    mean: Tensor,
    zoh: Tensor | None,
) -> None:
    """Fill the means that are not None."""
    from infssm.kernels._triton.kernels.states import forward as kernel

    batch, tokens, channels = delta.shape
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    tensors = (delta, turned(A), bias, a, mean, zoh, *delta.stride()[:2], *cut.sizes[1:])
    run(kernel, batch * tokens * groups, a, *tensors, SOFTPLUS=softplus, **cut.constants)


def backward(
    delta: Tensor,
    A: Tensor,
    bias: Tensor | None,
    groups: int,
    softplus: bool,
    grad_a: Tensor | None,
    grad_delta: Tensor | None,
    grad_zoh: Tensor | None,
    ddelta: Tensor,
    dA: Tensor,
    dbias: Tensor | None,
) -> None:
    """Fill the gradients that are not None."""
    from infssm.kernels._triton.kernels.states import backward as kernel

    batch, tokens, channels = delta.shape
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    parts = -(-batch * tokens // _ROWS)
    by_part = [None if grad is None else new(dA, parts, *grad.shape) for grad in (dA.mT, dbias)]
    run(
        *(kernel, parts * groups * cut.blocks, dA, delta, turned(A), bias, grad_a, grad_delta, grad_zoh),
        *(ddelta, *by_part, *delta.stride()[:2], *cut.sizes),
        SOFTPLUS=softplus,
        ROWS=_ROWS,
        **cut.constants,
    )
    for grad, part in zip((dA.mT, dbias), by_part, strict=True):
        if grad is not None and part is not None:
            grad.copy_(part.sum(0))
