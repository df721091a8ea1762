"""The scan of Mamba-2 in chunks of tokens: nearly all of its work is in matrix products (state space duality).

Within a chunk, with s the running sum of delta A, `y_i = sum_{j <= i} exp(s_i - s_j) (C_i . B_j) delta_j u_j`; between
chunks one state [head size, n] is carried, which is all that the backward keeps. Exponents `s_i - s_j` are sums of the
steps between j and i, not differences of running sums, whose rounding would be that of the whole chunk. Shapes below:
b batch, c chunks, L tokens of a chunk, g groups, k heads of a group, p head size, n states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64


class Chunks(NamedTuple):
    """Inputs in chunks, and what they decay by.

    x: [b, c, g, L, k p], the input times the step size; B, C: [b, c, g, L, n];
    inside: [b, c, g, k, L, L], exp(s_i - s_j) where token j reaches token i, else 0;
    entering: [b, c, g, L, k], by which the state before the chunk reaches a token; leaving: by which a token reaches
    the state after the chunk; through: [b, c, g, k], by which the one state reaches the other.
    """

    x: Tensor
    B: Tensor
    C: Tensor
    inside: Tensor
    entering: Tensor
    leaving: Tensor
    through: Tensor


def _decays(steps: Tensor, runs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """inside, entering, leaving, through from delta A [b, c, g, L, k] and the packed sequences [b, c, L] or None."""
    between = steps.mT.unsqueeze(-1).expand(*steps.mT.shape, steps.shape[-2]).tril(-1).cumsum(-2)
    inside = between.exp_().tril_()
    entering, leaving = steps.cumsum(3).exp_(), inside[..., -1, :].mT.clone()
    through = entering[..., -1, :]
    if runs is None:
        return inside, entering, leaving, through
    before = F.pad(runs[:, :-1, -1], (1, 0))  # the sequence that the state before a chunk belongs to
    other = runs.unsqueeze(-1) != runs.unsqueeze(-2)
    inside.masked_fill_(other[:, :, None, None], 0.0)
    entering = entering * (runs == before.unsqueeze(-1))[:, :, None, :, None]
    leaving = leaving * (runs == runs[..., -1:])[:, :, None, :, None]
    return inside, entering, leaving, through * (runs[..., -1] == before)[:, :, None, None]


def _cut(tensor: Tensor, chunk: int, groups: int) -> Tensor:
    """[b, tokens, g m] -> [b, c, g, L, m], the last chunk filled with 0."""
    missing = -tensor.shape[1] % chunk
    tensor = F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    return torch.unflatten(torch.unflatten(tensor, 1, (-1, chunk)), -1, (groups, -1)).transpose(2, 3)


def _joined(tensor: Tensor, tokens: int) -> Tensor:
    """[b, c, g, L, m] -> [b, tokens, g m]."""
    return tensor.transpose(2, 3).flatten(3).flatten(1, 2)[:, :tokens]


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """[..., k p] times [..., k]."""
    return (torch.unflatten(x, -1, (by.shape[-1], -1)) * by.unsqueeze(-1)).flatten(-2)


def _heads(x: Tensor, k: int) -> Tensor:
    """[..., L, k p] -> [..., k, L, p]."""
    return torch.unflatten(x, -1, (k, -1)).transpose(-2, -3)


def _prepare(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, runs: Tensor | None) -> tuple[Chunks, Tensor]:
    """The chunks, and delta in chunks [b, c, g, L, k]."""
    groups = B.shape[2]
    dt = _cut(delta, CHUNK, groups)
    steps = dt * A.view(groups, 1, -1)
    rows_B, rows_C = (_cut(tensor.flatten(2), CHUNK, groups) for tensor in (B, C))
    if runs is not None:
        missing = -runs.shape[1] % CHUNK
        runs = torch.unflatten(torch.cat([runs, runs[:, -1:].expand(-1, missing)], dim=1), 1, (-1, CHUNK))
    return Chunks(_scaled(_cut(u, CHUNK, groups), dt), rows_B, rows_C, *_decays(steps, runs)), dt


def _states(x: Chunks) -> Tensor:
    """The state before each chunk: [b, c, g, n, k p]."""
    added = x.B.mT @ _scaled(x.x, x.leaving)
    state, before = torch.zeros_like(added[:, 0]), []
    for one, through in zip(added.unbind(1), x.through.unbind(1), strict=True):
        before.append(state)
        state = _scaled(state, through.unsqueeze(-2)) + one
    return torch.stack(before, dim=1)


class _Scan(torch.autograd.Function):
    """y without skip and gate; differentiable once."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, runs: Tensor | None) -> Tensor:
        """u: [b, tokens, channels]; delta: [b, tokens, heads]; A: [heads]; B, C: [b, tokens, g, n]."""
        x, _ = _prepare(u, delta, A, B, C, runs)
        before, k = _states(x), x.through.shape[-1]
        y = _scaled(x.C @ before, x.entering)
        weights = x.inside * (x.C @ x.B.mT).unsqueeze(3)
        y += (weights @ _heads(x.x, k)).transpose(-2, -3).flatten(-2)
        y = _joined(y, u.shape[1])
        ctx.save_for_backward(u, delta, A, B, C, runs, before)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of u, delta, A, B, C."""
        u, delta, A, B, C, runs, before = ctx.saved_tensors
        tokens, groups = u.shape[1], B.shape[2]
        x, dt = _prepare(u, delta, A, B, C, runs)
        k = x.through.shape[-1]
        dy = _cut(grad, CHUNK, groups)
        entered = _scaled(dy, x.entering)
        after = _pulled_states(x, x.C.mT @ entered)
        # What reaches the state after the chunk, then what reaches tokens of the chunk.
        dx = leaving = _scaled(x.B @ after, x.leaving)
        dB, dC = _scaled(x.x, x.leaving) @ after.mT, entered @ before.mT
        similar, by_head = (x.C @ x.B.mT).unsqueeze(3), _heads(dy, k)
        dx = dx + ((x.inside * similar).mT @ by_head).transpose(-2, -3).flatten(-2)
        pairs = (by_head @ _heads(x.x, k).mT).mul_(x.inside)
        products = pairs.sum(3)
        dB, dC = dB + products.mT @ x.C, dC + products @ x.B
        # The gradient of delta_t A is the sum of all that passes token t: what tokens before t give to tokens from t on
        # and to the state after the chunk, and what the state before the chunk gives to tokens from t on and to the
        # state after it. As a difference of larger sums it would lose what strong decays leave of it.
        from_later = _sum_from(pairs.mul_(similar), -2).tril_(-1).sum(-1).mT
        left = F.pad(_dots(x.x, leaving, k), (0, 0, 1, -1)).cumsum(3)
        entered = _sum_from(_dots(entered, x.C @ before, k), 3)
        passed = x.through * _dots(before, after, k).sum(-2)
        decay = from_later + left + entered + passed.unsqueeze(-2)
        ddelta = decay * A.view(groups, 1, k) + _dots(_cut(u, CHUNK, groups), dx, k)
        dA = (decay * dt).sum((0, 1, 3)).flatten()
        rows = (_joined(part, tokens).view(B.shape) for part in (dB, dC))
        return _joined(_scaled(dx, dt), tokens), _joined(ddelta, tokens), dA, *rows, None


def _pulled_states(x: Chunks, entering: Tensor) -> Tensor:
    """Gradients of the state after each chunk, from those [b, c, g, n, k p] of the state before each by its tokens."""
    state, after = torch.zeros_like(entering[:, 0]), []
    for one, through in zip(reversed(entering.unbind(1)), reversed(x.through.unbind(1)), strict=True):
        after.append(state)
        state = _scaled(state, through.unsqueeze(-2)) + one
    return torch.stack(after[::-1], dim=1)


def _sum_from(x: Tensor, dim: int) -> Tensor:
    """Sums over each position and all after it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _dots(one: Tensor, other: Tensor, k: int) -> Tensor:
    """Products of [..., k p] summed over p: [..., k]."""
    return torch.unflatten(one * other, -1, (k, -1)).sum(-1)


def chunked_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, runs: Tensor | None) -> Tensor:
    """The scan of heads with one transition each, without skip and gate; see `scan_heads`."""
    y: Tensor = _Scan.apply(u, delta, A, B, C, runs)  # type: ignore[no-untyped-call]
    return y
