"""The selective scan and its mean states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infssm.kernels._checks import compute_dtype

# Tokens whose [batch, tokens, channels, n] tensors exist at one time; the backward recomputes chunk by chunk.
CHUNK = 16

Means = tuple[Tensor, Tensor, Tensor | None]


def selective_scan(
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
    last: bool,  # noqa: ARG001 - it costs nothing here, so it is always returned
    states: bool,
    zoh: bool,
) -> tuple[Tensor, Tensor, Means | None]:
    """y, last state and the mean states (or None); B, C: [batch, tokens, groups, n]."""
    dtype = compute_dtype(u, delta, A, B, C)
    with torch.autocast(u.device.type, enabled=False):
        x, dt = u.to(dtype), discretise(delta.to(dtype), delta_bias, delta_softplus)
        y, end, means = _scan_chunks(x, dt, A.to(dtype), B.to(dtype), C.to(dtype), reverse, initial_state, states, zoh)
        if D is not None:
            y = y + D * x
        if z is not None:
            y = y * F.silu(z.to(dtype))
    return y.to(u.dtype), end, means


def mean_states(
    delta: Tensor, A: Tensor, delta_bias: Tensor | None, delta_softplus: bool, groups: int, zoh: bool
) -> Means:
    """Means over the channels of each group: [batch, tokens, groups, n], [batch, tokens, groups], like the first."""
    dtype = compute_dtype(delta, A)
    dt = _split(discretise(delta.to(dtype), delta_bias, delta_softplus), -1, groups)
    grouped = _split(A.to(dtype), 0, groups)
    parts = [_recomputed(_chunk_means, part, grouped, zoh) for part in torch.split(dt, CHUNK, dim=1)]
    a = torch.cat([part[0] for part in parts], dim=1)
    return a, dt.mean(-1), torch.cat([part[1] for part in parts], dim=1) if zoh else None


def _split(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Split the channel dimension `dim` into [groups, channels / groups]."""
    size = tensor.shape[dim] // groups
    return torch.unflatten(tensor, dim, (groups, size))


def _recomputed(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """Call `function`, keeping only its inputs for the backward."""
    result: tuple[Tensor, ...] = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def discretise(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    """The step size the scan uses: delta plus bias, through softplus if asked."""
    if delta_bias is not None:
        delta = delta + delta_bias
    return F.softplus(delta) if delta_softplus else delta


def _scan_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    reverse: bool,
    initial_state: Tensor | None,
    states: bool,
    zoh: bool,
) -> tuple[Tensor, Tensor, Means | None]:
    batch, _, channels = x.shape
    groups, n = B.shape[2:]
    h = x.new_zeros(batch, channels, n) if initial_state is None else initial_state.to(x.dtype)
    h, A = _split(h, 1, groups), _split(A, 0, groups)
    x, dt = _split(x, -1, groups), _split(dt, -1, groups)
    # Splitting, unlike slicing, puts the gradients of the chunks together once.
    chunks = list(zip(*(torch.split(tensor, CHUNK, dim=1) for tensor in (x, dt, B, C)), strict=True))
    parts = []
    for u, delta, b, c in reversed(chunks) if reverse else chunks:
        h, *part = _recomputed(_scan_chunk, h, u, delta, A, b, c, reverse, states, zoh)
        parts.append(part)
    if reverse:
        parts.reverse()
    y = torch.cat([part[0] for part in parts], dim=1).flatten(-2)
    if not states:
        return y, h.flatten(1, 2), None
    a = torch.cat([part[1] for part in parts], dim=1)
    return y, h.flatten(1, 2), (a, dt.mean(-1), torch.cat([part[2] for part in parts], dim=1) if zoh else None)


def _scan_chunk(
    h: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, reverse: bool, states: bool, zoh: bool
) -> tuple[Tensor, ...]:
    """Last h, y and means of a chunk. h: [batch, groups, k, n]; x, dt: [batch, T, groups, k]; A: [groups, k, n]."""
    abar = torch.exp(dt.unsqueeze(-1) * A).unbind(1)
    drive = ((dt * x).unsqueeze(-1) * B.unsqueeze(3)).unbind(1)
    steps = range(len(abar) - 1, -1, -1) if reverse else range(len(abar))
    history = []
    for t in steps:
        h = abar[t] * h + drive[t]
        history.append(h)
    if reverse:
        history.reverse()
    y = (torch.stack(history, dim=1) * C.unsqueeze(3)).sum(-1) if history else torch.zeros_like(x)
    return (h, y, *(_chunk_means(dt, A, zoh) if states else ()))


def _chunk_means(dt: Tensor, A: Tensor, zoh: bool) -> tuple[Tensor, ...]:
    exponent = dt.unsqueeze(-1) * A
    a = exponent.exp().mean(-2)
    if not zoh:
        return (a,)
    return a, (dt.unsqueeze(-1) * _exp_slope(exponent)).mean(-2)


def _exp_slope(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, by its series near 0, so that the derivative keeps its digits there too."""
    near = x.abs() < 0.05
    series = torch.ones_like(x)
    for k in range(9, 1, -1):
        series = 1 + series * x / k
    return torch.where(near, series, x.expm1() / torch.where(near, 1, x))
