"""Mean discretised states of a selective layer, without a scan."""

from __future__ import annotations

from torch import Tensor

from infssm.ops import reference as _reference
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, maybe_single, single
from infssm.ops.checks import expect_channels, expect_floats, expect_rank, expect_shape, split_groups
from infssm.ops.records import ScanStates


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
    expect_floats(("delta", "A", "delta_bias"), (delta, A, delta_bias))
    expect_channels("delta", delta)
    channels = delta.shape[-1]
    expect_shape("A", A, (channels, A.shape[1]))
    expect_shape("delta_bias", delta_bias, (channels,))
    split_groups(channels, groups or 1)
    chosen = choose(backend, delta, A, delta_bias)
    if chosen == "reference":
        states = _reference.mean_states(delta, A, delta_bias, delta_softplus, groups or 1, zoh)
    else:
        tensors = single(delta), single(A), maybe_single(delta_bias)
        a, mean, quotient = _ops.mean_states(*tensors, groups or 1, delta_softplus, zoh, chosen == "triton")
        states = ScanStates(a, mean, quotient if zoh else None)
    return states if groups is not None else states.without_groups()
