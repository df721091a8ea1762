"""Mean states without a scan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, given, needed, new
from infssm.kernels._ops.states import _mean_backward_fake, _mean_fake, _mean_setup
from infssm.kernels._triton._launch import DEVICES, Cut, rows_of, run, turned

# Tokens whose share of dA one program adds up.
_ROWS = 64


def _mean(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.states import forward

    delta, A, bias, groups, softplus, _ = args
    batch, tokens, channels = delta.shape
    delta = rows_of(delta)
    a, mean, zoh = outputs = _mean_fake(*args)
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    tensors = (delta, turned(A), flat(bias), a, mean, given(zoh), *delta.stride()[:2], *cut.sizes[1:])
    run(forward, batch * tokens * groups, a, *tensors, SOFTPLUS=softplus, **cut.constants)
    return outputs


def _mean_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    result = mean_states_backward(*ctx.saved_tensors, *ctx.options, *grads)
    return (*needed(ctx, result), None, None, None)


def _mean_backward(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.states import backward

    delta, A, bias, groups, softplus, *grads = args
    batch, tokens, channels = delta.shape
    delta = rows_of(delta)
    ddelta, dA, dbias = outputs = _mean_backward_fake(*args)
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    parts = -(-batch * tokens // _ROWS)
    by_part = [new(dA, parts, *grad.shape) if grad.numel() else None for grad in (dA.mT, dbias)]
    run(
        *(
            backward,
            parts * groups * cut.blocks,
            dA,
            delta,
            turned(A),
            flat(bias),
            *(flat(given(grad)) for grad in grads),
        ),
        *(ddelta, *by_part, *delta.stride()[:2], *cut.sizes),
        SOFTPLUS=softplus,
        ROWS=_ROWS,
        **cut.constants,
    )
    for grad, part in zip((dA.mT, dbias), by_part, strict=True):
        if part is not None:
            grad.copy_(part.sum(0))
    return outputs


mean_states = define(
    "triton_mean_states(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, bool zoh)"
    " -> (Tensor a, Tensor delta, Tensor zoh)",
    _mean,
    _mean_fake,
    DEVICES,
)
mean_states_backward = define(
    "triton_mean_states_backward(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, Tensor? grad_a,"
    " Tensor? grad_delta, Tensor? grad_zoh) -> (Tensor, Tensor, Tensor)",
    _mean_backward,
    _mean_backward_fake,
    DEVICES,
)
differentiate("triton_mean_states", _mean_autograd, _mean_setup)
