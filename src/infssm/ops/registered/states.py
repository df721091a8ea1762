"""Mean states without a scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.checks import expect_rank
from infssm.ops.records import ScanStates
from infssm.ops.registered.library import asked_for, define, differentiate, flat, given, native, new, rows
from infssm.ops.triton import states as _triton


def _mean_fake(*args: Any) -> tuple[Tensor, ...]:
    delta, A, _, groups, _, zoh, _ = args
    expect_rank("delta", delta, "batch, tokens, channels")
    expect_rank("A", A, "channels, n")
    batch, tokens, _ = delta.shape
    shape = (batch, tokens, groups, A.shape[1])
    return new(A, *shape), new(A, *shape[:3]), new(A, *shape) if zoh else new(A, 0)


def _mean(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, _, _ = args
    outputs = _mean_fake(*args)
    tensors = (rows(delta), A, flat(bias), groups, softplus, torch.get_num_threads())
    native.mean_states_forward(*tensors, ScanStates(*map(given, outputs)))
    return outputs


def _triton_mean(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, _, _ = args
    outputs = _mean_fake(*args)
    _triton.forward(rows(delta), A, flat(bias), groups, softplus, [*map(given, outputs)])
    return outputs


def _mean_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    delta, A, bias, groups, softplus, _, triton = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(delta, A, bias)
    ctx.options = (groups, softplus)
    ctx.triton = triton


def _mean_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    result = mean_states_backward(*ctx.saved_tensors, *ctx.options, *grads, ctx.triton)
    return (*asked_for(ctx, result), None, None, None, None)


def _mean_backward_fake(delta: Tensor, A: Tensor, delta_bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return new(A, *delta.shape), new(A, *A.shape), new(A, A.shape[0] if delta_bias is not None else 0)


def _mean_backward(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, grad_a, grad_delta, grad_zoh, _ = args
    found = _mean_backward_fake(*args)
    shape = (*delta.shape[:2], groups, A.shape[1])
    grad_a = delta.new_zeros(shape) if grad_a is None else grad_a.contiguous()
    grad_delta = delta.new_zeros(shape[:3]) if grad_delta is None else grad_delta.contiguous()
    tensors = (rows(delta), A, flat(bias), groups, softplus, torch.get_num_threads())
    grads = ScanStates(grad_a, grad_delta, flat(given(grad_zoh)))
    native.mean_states_backward(*tensors, grads, *map(given, found))
    return found


def _triton_backward(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, *grads, _ = args
    found = _mean_backward_fake(*args)
    by_means = [flat(given(grad)) for grad in grads]
    _triton.backward(rows(delta), A, flat(bias), groups, softplus, by_means, [*map(given, found)])
    return found


mean_states = define(
    "mean_states(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, bool zoh, bool triton)"
    " -> (Tensor a, Tensor delta, Tensor zoh)",
    _mean,
    _mean_fake,
    triton=_triton_mean,
)
mean_states_backward = define(
    "mean_states_backward(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, Tensor? grad_a,"
    " Tensor? grad_delta, Tensor? grad_zoh, bool triton) -> (Tensor, Tensor, Tensor)",
    _mean_backward,
    _mean_backward_fake,
    triton=_triton_backward,
)
differentiate("mean_states", _mean_autograd, _mean_setup)
