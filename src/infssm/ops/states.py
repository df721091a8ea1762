"""Mean discretised states of a selective layer, without a scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.backend import choose, in_float32
from infssm.ops.checks import compute_dtype, expect_channels, expect_rank, expect_shape, split_groups
from infssm.ops.library import asked_for, define, flat, given, keep, kept, native, new, rows
from infssm.ops.scan import CHUNK, KernelOutputs, ScanStates, chunk_means, recomputed, split_channels, step_size
from infssm.ops.triton import states as _triton


def mean_states(
    delta: Tensor,
    A: Tensor,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    groups: int | None = None,
    zoh: bool = False,
    backend: str | None = None,
) -> ScanStates:
    """The states `selective_scan(..., return_states=True)` returns, where no scan is wanted.

    delta: [batch, tokens, channels]; A: [channels, n]; delta_bias: [channels].
    groups=None averages over all channels; an integer keeps one mean per group of channels.
    """
    chosen = choose(backend, delta, A, delta_bias, names=("delta", "A", "delta_bias"))
    if chosen != "cpu":  # the compiled module checks the shapes itself
        expect_rank("delta", delta, "batch, tokens, channels")
        expect_rank("A", A, "channels, n")
        expect_channels("delta", delta)
        expect_shape("A", A, (delta.shape[-1], A.shape[1]))
        expect_shape("delta_bias", delta_bias, delta.shape[-1:])
        split_groups(delta.shape[-1], groups or 1)
    if chosen == "reference":
        states = _reference(delta, A, delta_bias, delta_softplus, groups or 1, zoh)
    else:
        tensors = in_float32((delta, A, delta_bias))
        a, mean, quotient = _mean_states(*tensors, groups or 1, delta_softplus, zoh, chosen == "triton")
        states = ScanStates(a, mean, quotient if zoh else None)
    return states if groups is not None else states.without_groups()


def _reference(
    delta: Tensor, A: Tensor, delta_bias: Tensor | None, delta_softplus: bool, groups: int, zoh: bool
) -> ScanStates:
    """Means over the channels of each group: [batch, tokens, groups, n], [batch, tokens, groups], like the first."""
    dtype = compute_dtype(delta, A)
    dt = split_channels(step_size(delta.to(dtype), delta_bias, delta_softplus), -1, groups)
    grouped = split_channels(A.to(dtype), 0, groups)
    parts = [recomputed(chunk_means, part, grouped, zoh) for part in torch.split(dt, CHUNK, dim=1)]
    a = torch.cat([part[0] for part in parts], dim=1)
    return ScanStates(a, dt.mean(-1), torch.cat([part[1] for part in parts], dim=1) if zoh else None)


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    delta, A, _, groups, _, zoh, _ = args
    if delta.ndim != 3 or A.ndim != 2:
        expect_rank("delta", delta, "batch, tokens, channels")
        expect_rank("A", A, "channels, n")
    batch, tokens, _ = delta.shape
    shape = (batch, tokens, groups, A.shape[1])
    return new(A, *shape), new(A, *shape[:3]), new(A, *shape) if zoh else new(A, 0)


def _kernel(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, _, triton = args
    outputs = _outputs(*args)
    if triton:
        _triton.forward(rows(delta), A, flat(bias), groups, softplus, [*map(given, outputs)])
    else:
        tensors = (rows(delta), A, flat(bias), groups, softplus, torch.get_num_threads())
        native.mean_states_forward(*tensors, KernelOutputs(None, None, *map(given, outputs)))
    return outputs


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    (*inputs, _, triton), _ = kept(ctx)
    return asked_for(ctx, _mean_states_backward(*inputs, *grads, triton))


def _input_grads(delta: Tensor, A: Tensor, delta_bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return new(A, *delta.shape), new(A, *A.shape), new(A, A.shape[0] if delta_bias is not None else 0)


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    delta, A, bias, groups, softplus, grad_a, grad_delta, grad_zoh, triton = args
    found = _input_grads(*args)
    if triton:
        grads = [flat(given(grad)) for grad in (grad_a, grad_delta, grad_zoh)]
        _triton.backward(rows(delta), A, flat(bias), groups, softplus, grads, [*map(given, found)])
        return found
    shape = (*delta.shape[:2], groups, A.shape[1])
    grad_a = delta.new_zeros(shape) if grad_a is None else grad_a.contiguous()
    grad_delta = delta.new_zeros(shape[:3]) if grad_delta is None else grad_delta.contiguous()
    tensors = (rows(delta), A, flat(bias), groups, softplus, torch.get_num_threads())
    of_means = KernelOutputs(None, None, grad_a, grad_delta, flat(given(grad_zoh)))
    native.mean_states_backward(*tensors, of_means, *map(given, found))
    return found


_mean_states_backward = define(
    "mean_states_backward(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, Tensor? grad_a,"
    " Tensor? grad_delta, Tensor? grad_zoh, bool triton) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _input_grads,
)
_mean_states = define(
    "mean_states(Tensor delta, Tensor A, Tensor? delta_bias, int groups, bool softplus, bool zoh, bool triton)"
    " -> (Tensor a, Tensor delta, Tensor zoh)",
    _kernel,
    _outputs,
    setup=lambda ctx, inputs, _: keep(ctx, inputs),
    backward=_backward,
)
