"""The selective scan, with the mean states it discretises anyway."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.kernels import _reference
from infssm.kernels._checks import expect_rank, expect_shape, split_groups
from infssm.kernels._operators import operators
from infssm.kernels.backend import maybe_single, single
from infssm.kernels.states import ScanStates, drop_groups


@overload
def selective_scan(
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
    return_last_state: Literal[False] = False,
    return_states: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def selective_scan(
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
    return_states: bool | Literal["zoh"] = False,
    backend: str | None = None,
) -> Any: ...
def selective_scan(
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
    return_states: bool | Literal["zoh"] = False,
    backend: str | None = None,
) -> Any:
    """Run `h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t`, `y_t = (C_t h_t + D u_t) silu(z_t)` over the tokens.

    u, delta, z: [batch, tokens, channels]; A: [channels, n] real; B, C: [batch, tokens, n] or
    [batch, tokens, groups, n]; D, delta_bias: [channels]; initial_state: [batch, channels, n].
    `delta_softplus` applies softplus to `delta + delta_bias`. `reverse` scans from the last token to the first.
    An A expanded from [channels, 1] (a scalar transition) costs one exponential per channel instead of n.

    Returns y: [batch, tokens, channels], or the tuple `(y[, last_state][, states])` of what was asked for;
    last_state: [batch, channels, n]; states: see `ScanStates` (`return_states="zoh"` fills its zoh).
    Every output is differentiable in every input.
    """
    _check(u, delta, A, B, C, D, z, delta_bias, initial_state, return_states)
    grouped = B.dim() == 4
    if not grouped:
        B, C = B.unsqueeze(2), C.unsqueeze(2)
    tensors = (u, delta, A, B, C, D, z, delta_bias)
    ops = operators(backend, *tensors, initial_state)
    run = _reference.selective_scan if ops is None else partial(_run_fused, ops)
    zoh = return_states == "zoh"
    y, last, means = run(*tensors, delta_softplus, reverse, initial_state, return_last_state, bool(return_states), zoh)
    outputs: tuple[Tensor | ScanStates, ...] = (y,)
    if return_last_state:
        outputs += (last,)
    if means is not None:
        states = ScanStates(*means)
        outputs += (states if grouped else drop_groups(states),)
    return outputs if len(outputs) > 1 else y


def _run_fused(
    ops: ModuleType,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    reverse: bool,
    initial_state: Tensor | None,
    last: bool,
    states: bool,
    zoh: bool,
) -> tuple[Tensor, Tensor, _reference.Means | None]:
    required = [single(tensor) for tensor in (u, delta, A, B, C)]
    optional = [maybe_single(tensor) for tensor in (D, z, delta_bias, initial_state)]
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*required, *optional))
    y, end, a, mean, quotient, _ = ops.scan(
        *required, *optional, delta_softplus, reverse, last, int(states) + int(zoh), save
    )
    return y.to(u.dtype), end, (a, mean, quotient if zoh else None) if states else None


def _check(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    return_states: bool | str,
) -> None:
    expect_rank("u", u, "batch, tokens, channels")
    batch, tokens, channels = u.shape
    expect_rank("A", A, "channels, n")
    if A.is_complex():
        raise ConfigError("A is complex; selective_scan takes a real diagonal")
    n = A.shape[1]
    expect_shape("A", A, (channels, n))
    expect_shape("delta", delta, u.shape)
    expect_shape("z", z, u.shape)
    expect_shape("D", D, (channels,))
    expect_shape("delta_bias", delta_bias, (channels,))
    expect_shape("initial_state", initial_state, (batch, channels, n))
    if B.dim() == 4:
        split_groups(channels, B.shape[2])
        expect_shape("B", B, (batch, tokens, B.shape[2], n))
    else:
        expect_shape("B", B, (batch, tokens, n))
    expect_shape("C", C, B.shape)
    if return_states not in (False, True, "zoh"):
        raise ConfigError(f"return_states={return_states!r}, expected False, True or 'zoh'")
