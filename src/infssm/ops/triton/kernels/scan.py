"""Selective scan, forward. One program walks the tokens of one batch element and one block of channels.

The state is a tile [STATES, COLS] in registers: one channel per lane of a warp, so that sums over states stay within a
thread and rows of u and delta are read as whole cache lines. Sums over channels are written per block and added up by
the caller: no atomics, so that two runs agree bit for bit. u and delta of the next token are loaded before the
arithmetic of the current one; B and C, which every lane holds whole, would cost too many registers for that. States and
channels that only fill up a tile have B = C = 0 and delta = 0: they stay 0.
"""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.math import exp_slope, softplus


@triton.jit
def place(groups, size, COLS: tl.constexpr):
    """Batch element, group and block of this program, its channels and which of them exist."""
    blocks = tl.cdiv(size, COLS)
    index = tl.program_id(0)
    inside = index % blocks * COLS + tl.arange(0, COLS)
    group = index // blocks % groups
    # Denying that channels are contiguous keeps the compiler from giving a lane four of them.
    channel = tl.max_contiguous(group * size + inside, 1)
    return (index // (blocks * groups)).to(tl.int64), group, index % blocks, channel, inside < size


@triton.jit
def token_at(t, tokens, REVERSE: tl.constexpr):
    """The token the scan reaches after t others; loads ahead that would leave the sequence stay at its end."""
    t = tl.minimum(tl.maximum(t, 0), tokens - 1).to(tl.int64)  # times a stride it may pass 2^31
    return tokens - 1 - t if REVERSE else t


@triton.jit
def read(u, delta, token, u_step, delta_step, channel, keep):
    """u and delta [COLS] of a token."""
    return (
        tl.load(u + token * u_step + channel, mask=keep, other=0.0),
        tl.load(delta + token * delta_step + channel, mask=keep, other=0.0),
    )


@triton.jit
def discretise(raw, bias, keep, SOFTPLUS: tl.constexpr):
    """The step size, 0 for channels that do not exist."""
    return tl.where(keep, softplus(raw + bias) if SOFTPLUS else raw + bias, 0.0)


@triton.jit
def restarts(seq, t, tokens, REVERSE: tl.constexpr):
    """Whether the token the scan reaches after t others begins a sequence; seq: [tokens]."""
    return tl.load(seq + token_at(t, tokens, REVERSE)) != tl.load(seq + token_at(t - 1, tokens, REVERSE))


@triton.jit
def advance(h, u, dt, A, B):
    """The state after a token, and exp(delta A)."""
    a = tl.exp(dt[None, :] * A)
    return a * h + (dt * u)[None, :] * B[:, None], a


# fmt: off
@triton.jit
def forward(
    u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state, y, last, saved, a_sum, delta_sum, zoh_sum,
    u_batch, u_step, delta_batch, delta_step, z_batch, z_step,
    B_batch, B_step, B_group, C_batch, C_step, C_group, batches, tokens, groups, size, n,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """y, the last state, the state before each chunk in `saved`, and the sums behind the mean states.

    A: [n, channels]; initial_state, last: [batch, n, channels]; saved: [batch, chunks, n, channels];
    sums: [blocks, batch, tokens, groups, n].
    """
    batch, group, block, channel, keep = place(groups, size, COLS)
    channels = groups * size
    state = tl.arange(0, STATES)
    real = state < n
    tile = real[:, None] & keep[None, :]
    inner = state[:, None] * channels + channel[None, :]  # of [n, channels]
    u, delta, y = u + batch * u_batch, delta + batch * delta_batch, y + batch * tokens * channels
    B, C = B + batch * B_batch + group * B_group, C + batch * C_batch + group * C_group
    sums = (block * batches + batch) * tokens * groups + group
    poles = tl.load(A + inner, mask=tile, other=0.0)
    skip = tl.load(D + channel, mask=keep, other=0.0) if D is not None else 0.0
    shift = tl.load(delta_bias + channel, mask=keep, other=0.0) if delta_bias is not None else 0.0
    h = tl.zeros((STATES, COLS), tl.float32)
    if initial_state is not None:
        h = tl.load(initial_state + batch * n * channels + inner, mask=tile, other=0.0)
    ut, raw = read(u, delta, token_at(0, tokens, REVERSE), u_step, delta_step, channel, keep)
    for t in range(tokens):
        token = token_at(t, tokens, REVERSE)
        b = tl.load(B + token * B_step + state, mask=real, other=0.0)
        c = tl.load(C + token * C_step + state, mask=real, other=0.0)
        next_u, next_raw = read(u, delta, token_at(t + 1, tokens, REVERSE), u_step, delta_step, channel, keep)
        if saved is not None:  # noqa: SIM102 - the first is decided at compile time
            if t % CHUNK == 0:
                chunk = batch * tl.cdiv(tokens, CHUNK) + t // CHUNK
                tl.store(saved + chunk * n * channels + inner, h, mask=tile)
        if seq_idx is not None:
            h = tl.where(restarts(seq_idx + batch * tokens, t, tokens, REVERSE), 0.0, h)
        dt = discretise(raw, shift, keep, SOFTPLUS)
        h, a = advance(h, ut, dt, poles, b)
        total = tl.sum(h * c[:, None], axis=0) + skip * ut
        if z is not None:
            gate = tl.load(z + batch * z_batch + token * z_step + channel, mask=keep, other=0.0)
            total *= gate * tl.sigmoid(gate)
        tl.store(y + token * channels + channel, total, mask=keep)
        if a_sum is not None:
            offset = sums + token * groups
            tl.store(delta_sum + offset, tl.sum(dt, axis=0))
            tl.store(a_sum + offset * n + state, tl.sum(tl.where(tile, a, 0.0), axis=1), mask=real)
            if zoh_sum is not None:
                hold = dt[None, :] * exp_slope(dt[None, :] * poles, a)
                tl.store(zoh_sum + offset * n + state, tl.sum(hold, axis=1), mask=real)
        ut, raw = next_u, next_raw
    if last is not None:
        tl.store(last + batch * n * channels + inner, h, mask=tile)
