"""Mean discretised states of a selective layer, without a scan."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from infssm.kernels import _reference
from infssm.kernels._checks import expect_rank, expect_shape, split_groups
from infssm.kernels._operators import operators
from infssm.kernels.backend import maybe_single, single


class ScanStates(NamedTuple):
    """Means over the channels (of each group) of what a selective layer discretises, in token order.

    a: [batch, tokens, n] mean of exp(delta A); delta: [batch, tokens] mean of delta;
    zoh: [batch, tokens, n] mean of (exp(delta A) - 1) / A, or None. With groups: [batch, tokens, groups, n].
    """

    a: Tensor
    delta: Tensor
    zoh: Tensor | None = None


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
    expect_rank("delta", delta, "batch, tokens, channels")
    expect_rank("A", A, "channels, n")
    channels = delta.shape[-1]
    expect_shape("A", A, (channels, A.shape[1]))
    expect_shape("delta_bias", delta_bias, (channels,))
    split_groups(channels, groups or 1)
    ops = operators(backend, delta, A, delta_bias)
    if ops is not None:
        bias = maybe_single(delta_bias)
        a, mean, quotient = ops.mean_states(single(delta), single(A), bias, groups or 1, delta_softplus, zoh)
        states = ScanStates(a, mean, quotient if zoh else None)
    else:
        states = ScanStates(*_reference.mean_states(delta, A, delta_bias, delta_softplus, groups or 1, zoh))
    return states if groups is not None else drop_groups(states)


def drop_groups(states: ScanStates) -> ScanStates:
    """Remove the group dimension of size 1."""
    zoh = None if states.zoh is None else states.zoh.squeeze(2)
    return ScanStates(states.a.squeeze(2), states.delta.squeeze(2), zoh)
