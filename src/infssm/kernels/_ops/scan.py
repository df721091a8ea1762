"""The selective scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, given, native, needed, new, rows

_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias"


def _scan_outputs(u: Tensor, A: Tensor, B: Tensor, last: bool, states: int, save: bool) -> tuple[Tensor, ...]:
    batch, tokens, channels = u.shape
    groups, n = B.shape[2], A.shape[1]
    lanes, chunk = native.lanes(), native.CHUNK
    padded = groups * ((channels // groups + lanes - 1) // lanes) * lanes
    return (
        new(u, batch, tokens, channels),
        new(u, batch, channels, n) if last else new(u, 0),
        new(u, batch, tokens, groups, n) if states else new(u, 0),
        new(u, batch, tokens, groups) if states else new(u, 0),
        new(u, batch, tokens, groups, n) if states == 2 else new(u, 0),
        new(u, batch, (tokens + chunk - 1) // chunk, padded * n) if save else new(u, 0),
    )


def _scan_fake(*args: Any) -> tuple[Tensor, ...]:
    u, _, A, B, *_, last, states, save = args
    return _scan_outputs(u, A, B, last, states, save)


def _scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
    reverse: bool,
    last: bool,
    states: int,
    save: bool,
) -> tuple[Tensor, ...]:
    outputs = _scan_outputs(u, A, B, last, states, save)
    tensors = (rows(u), rows(delta), A, rows(B), rows(C), flat(D), rows(z), flat(delta_bias))
    wanted = (given(output) for output in outputs)
    threads = torch.get_num_threads()
    native.scan_forward(*tensors, flat(initial_state), softplus, reverse, threads, *wanted)
    return outputs


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, initial_state, softplus, reverse, _, _, _ = inputs
    saved = output[-1]
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, saved)
    ctx.options = (initial_state is not None, softplus, reverse)


def _scan_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, saved = ctx.saved_tensors
    result = scan_backward(*tensors, *ctx.options, saved, *grads[:5])
    return (*needed(ctx, result), None, None, None, None, None)


def _scan_backward_outputs(*args: Any) -> tuple[Tensor, ...]:
    u, _, A, B, C, D, z, delta_bias, initial, *_ = args
    channels, n = A.shape
    return (
        new(u, *u.shape),
        new(u, *u.shape),
        new(u, channels, n),
        new(u, *B.shape),
        new(u, *C.shape),
        new(u, 0) if D is None else new(u, channels),
        new(u, 0) if z is None else new(u, *u.shape),
        new(u, 0) if delta_bias is None else new(u, channels),
        new(u, u.shape[0], channels, n) if initial else new(u, 0),
    )


def _scan_backward(*args: Any) -> tuple[Tensor, ...]:
    u, delta, A, B, C, D, z, bias, initial, softplus, reverse, saved, grad_y, *grad_states = args
    du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = outputs = _scan_backward_outputs(*args)
    grad_y = torch.zeros_like(du) if grad_y is None else grad_y
    grad_last, grad_a, grad_delta, grad_zoh = (flat(given(grad)) for grad in grad_states)
    if grad_zoh is not None and grad_a is None:
        grad_a = torch.zeros_like(grad_zoh)
    native.scan_backward(
        *(rows(u), rows(delta), A, rows(B), rows(C), flat(D), rows(z), flat(bias)),
        *(softplus, reverse, torch.get_num_threads(), saved.contiguous()),
        *(rows(grad_y), grad_last, grad_a, grad_delta, grad_zoh, du, ddelta, dA, dB, dC),
        *(None if D is None else dD, None if z is None else dz, None if bias is None else dbias),
        dinitial if initial else None,
    )
    return outputs


scan = define(
    f"scan({_INPUTS}, Tensor? initial_state, bool softplus, bool reverse, bool last, int states, bool save)"
    " -> (Tensor y, Tensor last, Tensor a, Tensor delta, Tensor zoh, Tensor saved)",
    _scan,
    _scan_fake,
)
scan_backward = define(
    f"scan_backward({_INPUTS}, bool initial, bool softplus, bool reverse, Tensor saved, Tensor? grad_y,"
    " Tensor? grad_last, Tensor? grad_a, Tensor? grad_delta, Tensor? grad_zoh)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    _scan_backward_outputs,
)
differentiate("scan", _scan_autograd, _scan_setup)
