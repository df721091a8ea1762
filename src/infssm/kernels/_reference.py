"""Every operation in plain PyTorch: any float dtype, any device, ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infssm.kernels._checks import compute_dtype
from infssm.kernels._lattice import angles, rotation_lattice
from infssm.kernels.arc import squared_arc

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


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, reverse: bool) -> Tensor:
    """Depthwise convolution over the tokens; x: [batch, tokens, channels]; weight: [channels, width]."""
    tokens, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, 0, width - 1) if reverse else (0, 0, width - 1, 0))
    taps = weight.flip(1) if reverse else weight
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for k in range(width):
        y = y + taps[:, k] * padded[:, k : k + tokens]
    return F.silu(y) if silu else y


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum in at least float32."""
    total = x.to(compute_dtype(x, residual))
    if residual is not None:
        total = total + residual
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), total


def fused_distance(old_a: Tensor, old_c: Tensor, new_a: Tensor, new_c: Tensor, kind: str, raw: bool) -> Tensor:
    """Squared distance of states [..., n], soft-normalised if raw; see the public function."""
    if raw:
        old_a, old_c, new_a, new_c = (torch.tanh(value / 2) for value in (old_a, old_c, new_a, new_c))
    if kind in ("martin", "fubini-study", "binet-cauchy"):
        value = _martin(old_a, new_a)
        return value if kind == "martin" else squared_arc(value) if kind == "fubini-study" else -torch.expm1(-value)
    if kind in ("chordal", "geodesic"):  # near poles paired: their differences keep digits that those of far ones lose
        sine, cosine = rotation_lattice(old_a.sort(dim=-1).values, new_a.sort(dim=-1).values)
        return 2 * sine.square().sum((-2, -1)) if kind == "chordal" else angles(sine, cosine).square().sum(-1)
    n = max(old_a.shape[-1], old_c.shape[-1])
    old_a, new_a = (a.expand(*a.shape[:-1], n) for a in (old_a, new_a))
    return (_simplified if kind == "simplified" else _aligned)(old_a, old_c, new_a, new_c)


def output_distance(
    old_a: Tensor, old_c: Tensor, old_b: Tensor, new_a: Tensor, new_c: Tensor, new_b: Tensor, raw: bool
) -> Tensor:
    """Energy of the difference of the impulse responses of states [..., n], soft-normalised if raw, through float64."""
    states = [value.double() for value in (old_a, old_c, old_b, new_a, new_c, new_b)]
    a, c, b, x, d, g = (torch.tanh(value / 2) for value in states) if raw else states
    a, x = (pole.expand_as(c) for pole in (a, x))
    poles, residues = torch.cat((a, x), dim=-1), torch.cat((-c * b, d * g), dim=-1)
    return (_outer(residues, residues) / (1 - _outer(poles, poles))).sum((-2, -1)).clamp_min(0).to(old_a.dtype)


def _martin(a: Tensor, b: Tensor) -> Tensor:
    d = a - b
    ratio = _outer(d, d) / ((1 - _outer(a, a)) * (1 - _outer(b, b)))
    return ratio.log1p().sum((-2, -1))


def _simplified(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    trace_old, trace_new = ((v * v / (1 - p * p)).sum(-1) for p, v in ((a, c), (b, d)))
    value = 1 - _overlap(a, c, b, d) / (trace_old * trace_new)
    equal = (torch.isclose(a, b) & torch.isclose(c, d)).all(-1)
    return torch.where(equal, 0.0, value)


def _aligned(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    # Near equality the value is the small difference of two numbers near 1: float64 keeps it.
    wide = [value.double() for value in (a, c, b, d)]
    old, new = wide[:2], wide[2:]
    cosine = _overlap(*old, *new) / (_overlap(*old, *old) * _overlap(*new, *new)).sqrt()
    return (1 - cosine).to(a.dtype)


def _overlap(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """tr(G G^T) of the cross-Gram G_ij = c_i d_j / (1 - a_i b_j)."""
    return ((_outer(c, d) / (1 - _outer(a, b))) ** 2).sum((-2, -1))


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)
