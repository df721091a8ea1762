"""The selective scan and its mean states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infssm.ops.checks import compute_dtype
from infssm.ops.records import ScanInputs, ScanOutput, ScanStates

# Tokens whose [batch, tokens, channels, n] tensors exist at one time; the backward recomputes chunk by chunk.
CHUNK = 16


def selective_scan(x: ScanInputs, last_state: bool, states: bool | str) -> ScanOutput:
    """The scan of a record; B, C: [batch, tokens, groups, n]."""
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    # Exported programs have no autocast to leave, and a program with both autocast and a loop node cannot be saved.
    exporting = torch.compiler.is_exporting()
    with contextlib.nullcontext() if exporting else torch.autocast(x.u.device.type, enabled=False):
        u, dt = x.u.to(dtype), discretise(x.delta.to(dtype), x.delta_bias, x.delta_softplus)
        wide = x._replace(u=u, delta=dt, A=x.A.to(dtype), B=x.B.to(dtype), C=x.C.to(dtype))
        y, end, means = _scan_chunks(wide, states)
        if x.D is not None:
            y = y + x.D * u
        if x.z is not None:
            y = y * F.silu(x.z.to(dtype))
    return ScanOutput(y, end if last_state else None, means)


def mean_states(
    delta: Tensor, A: Tensor, delta_bias: Tensor | None, delta_softplus: bool, groups: int, zoh: bool
) -> ScanStates:
    """Means over the channels of each group: [batch, tokens, groups, n], [batch, tokens, groups], like the first."""
    dtype = compute_dtype(delta, A)
    dt = _split(discretise(delta.to(dtype), delta_bias, delta_softplus), -1, groups)
    grouped = _split(A.to(dtype), 0, groups)
    parts = [_recomputed(_chunk_means, part, grouped, zoh) for part in torch.split(dt, CHUNK, dim=1)]
    a = torch.cat([part[0] for part in parts], dim=1)
    return ScanStates(a, dt.mean(-1), torch.cat([part[1] for part in parts], dim=1) if zoh else None)


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


def _scan_chunks(x: ScanInputs, states: bool | str) -> tuple[Tensor, Tensor, ScanStates | None]:
    """y before skip and gate, the last state and the means; delta is the step size."""
    if torch.compiler.is_exporting() and not states and x.seq_idx is None:
        return _scan_exported(x)
    batch, tokens, channels = x.u.shape
    groups, n = x.B.shape[2:]
    h = x.u.new_zeros(batch, channels, n) if x.initial_state is None else x.initial_state.to(x.u.dtype)
    h, A = _split(h, 1, groups), _split(x.A, 0, groups)
    u, dt = _split(x.u, -1, groups), _split(x.delta, -1, groups)
    stays = _stays(x) if x.seq_idx is not None else u.new_ones(1, tokens)
    # Splitting, unlike slicing, puts the gradients of the chunks together once.
    chunks = list(zip(*(torch.split(tensor, CHUNK, dim=1) for tensor in (u, dt, x.B, x.C, stays)), strict=True))
    parts = []
    for chunk in reversed(chunks) if x.reverse else chunks:
        h, *part = _recomputed(_scan_chunk, h, A, *chunk, x.reverse, states)
        parts.append(part)
    if x.reverse:
        parts.reverse()
    y = torch.cat([part[0] for part in parts], dim=1).flatten(-2)
    if not states:
        return y, h.flatten(1, 2), None
    a = torch.cat([part[1] for part in parts], dim=1)
    zoh = torch.cat([part[2] for part in parts], dim=1) if states == "zoh" else None
    return y, h.flatten(1, 2), ScanStates(a, dt.mean(-1), zoh)


def _scan_exported(x: ScanInputs) -> tuple[Tensor, Tensor, None]:
    """The scan as one loop node of an exported program (`Scan` in ONNX), for any number of tokens.

    Unrolled, every token would be a dozen nodes: a Vim with 64 tokens and 6 layers took over nine minutes to export.
    """
    from torch._higher_order_ops.scan import scan

    groups = x.B.shape[2]
    h = x.u.new_zeros(x.u.shape[0], *x.A.shape) if x.initial_state is None else x.initial_state.to(x.u.dtype)
    h, A = _split(h, 1, groups), _split(x.A, 0, groups)
    u, dt = _split(x.u, -1, groups), _split(x.delta, -1, groups)

    def step(h: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        dt, drive, B, C = token  # [batch, groups, k] and [batch, groups, n]
        h = torch.exp(dt.unsqueeze(-1) * A) * h + drive.unsqueeze(-1) * B.unsqueeze(2)
        return h, (h * C.unsqueeze(2)).sum(-1)

    h, y = scan(step, h, [tensor.transpose(0, 1) for tensor in (dt, dt * u, x.B, x.C)], reverse=x.reverse)
    return y.transpose(0, 1).flatten(-2), h.flatten(1, 2), None


def _stays(x: ScanInputs) -> Tensor:
    """1 where the state goes on from the token before in scan order, 0 where a sequence begins: [batch, tokens]."""
    assert x.seq_idx is not None
    changes = (x.seq_idx[:, 1:] != x.seq_idx[:, :-1]).to(x.u.dtype)
    return 1 - F.pad(changes, (0, 1) if x.reverse else (1, 0))


def _scan_chunk(
    h: Tensor,
    A: Tensor,
    u: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    stays: Tensor,
    reverse: bool,
    states: bool | str,
) -> tuple[Tensor, ...]:
    """Last h, y and means of a chunk. h: [batch, groups, k, n]; u, dt: [batch, T, groups, k]; A: [groups, k, n]."""
    factor = stays[..., None, None, None] * torch.exp(dt.unsqueeze(-1) * A)
    abar, drive = factor.unbind(1), ((dt * u).unsqueeze(-1) * B.unsqueeze(3)).unbind(1)
    steps = range(len(abar) - 1, -1, -1) if reverse else range(len(abar))
    history = []
    for t in steps:
        h = abar[t] * h + drive[t]
        history.append(h)
    if reverse:
        history.reverse()
    y = (torch.stack(history, dim=1) * C.unsqueeze(3)).sum(-1) if history else torch.zeros_like(u)
    return (h, y, *(_chunk_means(dt, A, states == "zoh") if states else ()))


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
