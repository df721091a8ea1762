"""The selective scan, with the mean states it discretises anyway."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import reference as _reference
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, single
from infssm.ops.checks import expect_channels, expect_floats, expect_rank, expect_shape, split_groups
from infssm.ops.records import ScanInputs, ScanOutput, ScanStates, runs

States = bool | Literal["zoh"]


@overload
def selective_scan(
    u: Tensor, *more: Any, return_states: Literal[True, "zoh"], return_last_state: Literal[True], **options: Any
) -> tuple[Tensor, Tensor, ScanStates]: ...
@overload
def selective_scan(
    u: Tensor, *more: Any, return_states: Literal[True, "zoh"], **options: Any
) -> tuple[Tensor, ScanStates]: ...
@overload
def selective_scan(
    u: Tensor, *more: Any, return_last_state: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, *more: Any, **options: Any) -> Tensor: ...
def selective_scan(  # type: ignore[misc] # the overloads say what is returned, and leave the arguments to this one
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    return_states: States = False,
    backend: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor | ScanStates, ...]:
    """Run `h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t`, `y_t = (C_t h_t + D u_t) silu(z_t)` over the tokens.

    u, delta, z: [batch, tokens, channels]; A: [channels, n] real; B, C: [batch, tokens, n] or
    [batch, tokens, groups, n]; D, delta_bias: [channels]; initial_state: [batch, channels, n].
    `delta_softplus` applies softplus to `delta + delta_bias`. `reverse` scans from the last token to the first.
    An A expanded from [channels, 1] (a scalar transition) costs one exponential per channel instead of n.
    seq_idx: [batch, tokens], for rows that hold several sequences: the state restarts where the number changes.

    Returns y: [batch, tokens, channels], or the tuple `(y[, last_state][, states])` of what was asked for;
    last_state: [batch, channels, n]; states: see `ScanStates` (`return_states="zoh"` fills its zoh).
    Every output is differentiable in every input.
    """
    x = ScanInputs(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, initial_state, seq_idx)
    found = scan(x, last_state=return_last_state, states=return_states, backend=backend)
    wanted = tuple(part for part in found if part is not None)
    return wanted if len(wanted) > 1 else found.y


def scan(x: ScanInputs, *, last_state: bool = False, states: States = False, backend: str | None = None) -> ScanOutput:
    """`selective_scan` of a record, into a record."""
    _check(x, states)
    tensors = [value for value in x[:-1] if isinstance(value, Tensor)]
    wide = any(tensor.dtype != torch.float32 for tensor in tensors)
    if wide:
        expect_floats(x._fields[:-1], x[:-1])
    grouped = x.B.dim() == 4
    B, C = (x.B, x.C) if grouped else (x.B.unsqueeze(2), x.C.unsqueeze(2))
    x = ScanInputs(x.u, x.delta, x.A, B, C, *x[5:-1], runs(x.seq_idx))
    chosen = choose(backend, *tensors)
    if chosen == "reference":
        found = _reference.selective_scan(x, last_state, states)
    else:
        save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        found = _run_fused(_single(x) if wide else x, last_state, states, save, chosen == "triton")
    found = found if x.u.dtype == found.y.dtype else found._replace(y=found.y.to(x.u.dtype))
    return found if grouped or found.states is None else found._replace(states=found.states.without_groups())


def _single(x: ScanInputs) -> ScanInputs:
    values: list[Any] = [single(value) if isinstance(value, Tensor) else value for value in x]
    return ScanInputs(*values)


def _run_fused(x: ScanInputs, last_state: bool, states: States, save: bool, triton: bool) -> ScanOutput:
    wanted = 0 if not states else 2 if states == "zoh" else 1
    y, last, a, delta, zoh, _ = _ops.scan(*x, last_state, wanted, save, triton)
    means = ScanStates(a, delta, zoh if wanted == 2 else None) if wanted else None
    return ScanOutput(y, last if last_state else None, means)


def _check(x: ScanInputs, states: bool | str) -> None:
    expect_rank("u", x.u, "batch, tokens, channels")
    batch, tokens, channels = x.u.shape
    expect_rank("A", x.A, "channels, n")
    n = x.A.shape[1]
    expect_channels("u", x.u)
    expect_shape("A", x.A, (channels, n))
    for name, tensor in (("delta", x.delta), ("z", x.z)):
        expect_shape(name, tensor, x.u.shape)
    for name, tensor in (("D", x.D), ("delta_bias", x.delta_bias)):
        expect_shape(name, tensor, (channels,))
    expect_shape("initial_state", x.initial_state, (batch, channels, n))
    expect_shape("seq_idx", x.seq_idx, (batch, tokens))
    if x.B.dim() == 4:
        split_groups(channels, x.B.shape[2])
        expect_shape("B", x.B, (batch, tokens, x.B.shape[2], n))
    else:
        expect_shape("B", x.B, (batch, tokens, n))
    expect_shape("C", x.C, x.B.shape)
    if states not in (False, True, "zoh"):
        raise ConfigError(f"return_states={states!r}, expected False, True or 'zoh'")
