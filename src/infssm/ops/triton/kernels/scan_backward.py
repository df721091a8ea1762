"""Selective scan, backward: chunks from last to first, each replayed from its boundary state and then pulled back."""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.math import exp_slope_derivative
from infssm.ops.triton.kernels.scan import advance, discretise, place, read, restarts, token_at


# fmt: off
@triton.jit
def backward(
    u, delta, A, B, C, D, z, delta_bias, seq_idx, saved, history, grad_y, grad_last, grad_a, grad_delta, grad_zoh,
    du, ddelta, dB, dC, dz, dA, dD, ddelta_bias, dinitial_state,
    u_batch, u_step, delta_batch, delta_step, z_batch, z_step,
    B_batch, B_step, B_group, C_batch, C_step, C_group, y_batch, y_step, batches, tokens, groups, size, n,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """Gradients; dB, dC per block of channels, dA, dD, ddelta_bias per batch element.

    history: [programs, CHUNK, STATES, COLS], the states before the tokens of one chunk; A: [n, channels];
    grad_last, dinitial_state, dA: [batch, n, channels].
    """
    batch, group, block, channel, keep = place(groups, size, COLS)
    channels = groups * size
    state = tl.arange(0, STATES)
    real = state < n
    tile = real[:, None] & keep[None, :]
    inner = state[:, None] * channels + channel[None, :]  # of [n, channels]
    own = batch * n * channels
    chunks = tl.cdiv(tokens, CHUNK)
    history += tl.program_id(0).to(tl.int64) * CHUNK * STATES * COLS
    history += state[:, None] * COLS + tl.max_contiguous(tl.arange(0, COLS), 1)[None, :]
    u, delta, grad_y = u + batch * u_batch, delta + batch * delta_batch, grad_y + batch * y_batch
    B, C = B + batch * B_batch + group * B_group, C + batch * C_batch + group * C_group
    sums = (block * batches + batch) * tokens * groups + group
    means = batch * tokens * groups + group
    share = 1.0 / size
    poles = tl.load(A + inner, mask=tile, other=0.0)
    skip = tl.load(D + channel, mask=keep, other=0.0) if D is not None else 0.0
    shift = tl.load(delta_bias + channel, mask=keep, other=0.0) if delta_bias is not None else 0.0
    carry = tl.zeros((STATES, COLS), tl.float32)  # gradient of the state, passed on to earlier tokens
    if grad_last is not None:
        carry = tl.load(grad_last + own + inner, mask=tile, other=0.0)
    total_A = tl.zeros((STATES, COLS), tl.float32)
    total_D = tl.zeros((COLS,), tl.float32)
    total_bias = tl.zeros((COLS,), tl.float32)
    for back in range(1, chunks + 1):
        first = (chunks - back) * CHUNK
        count = tl.minimum(CHUNK, tokens - first)
        h = tl.load(saved + (batch * chunks + chunks - back) * n * channels + inner, mask=tile, other=0.0)
        ut, raw = read(u, delta, token_at(first, tokens, REVERSE), u_step, delta_step, channel, keep)
        for i in range(count):
            b = tl.load(B + token_at(first + i, tokens, REVERSE) * B_step + state, mask=real, other=0.0)
            after = token_at(first + i + 1, tokens, REVERSE)
            next_u, next_raw = read(u, delta, after, u_step, delta_step, channel, keep)
            tl.store(history + i * STATES * COLS, h)
            if seq_idx is not None:
                h = tl.where(restarts(seq_idx + batch * tokens, first + i, tokens, REVERSE), 0.0, h)
            h, _ = advance(h, ut, discretise(raw, shift, keep, SOFTPLUS), poles, b)
            ut, raw = next_u, next_raw
        tl.debug_barrier()
        ut, raw = read(u, delta, token_at(first + count - 1, tokens, REVERSE), u_step, delta_step, channel, keep)
        for k in range(1, count + 1):
            token = token_at(first + count - k, tokens, REVERSE)
            before = tl.load(history + (count - k) * STATES * COLS)
            dy = tl.load(grad_y + token * y_step + channel, mask=keep, other=0.0)
            b = tl.load(B + token * B_step + state, mask=real, other=0.0)
            c = tl.load(C + token * C_step + state, mask=real, other=0.0)
            after = token_at(first + count - k - 1, tokens, REVERSE)
            next_u, next_raw = read(u, delta, after, u_step, delta_step, channel, keep)
            row = (batch * tokens + token) * channels + channel
            if z is not None:
                gate = tl.load(z + batch * z_batch + token * z_step + channel, mask=keep, other=0.0)
                sigmoid = tl.sigmoid(gate)
                y = tl.sum(h * c[:, None], axis=0) + skip * ut
                tl.store(dz + row, dy * y * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=keep)
                dy *= gate * sigmoid
            dt = discretise(raw, shift, keep, SOFTPLUS)
            a = tl.exp(dt[None, :] * poles)
            by_block = (sums + token * groups) * n + state
            tl.store(dC + by_block, tl.sum(h * dy[None, :], axis=1), mask=real)
            g = carry + dy[None, :] * c[:, None]
            tl.store(dB + by_block, tl.sum(g * (dt * ut)[None, :], axis=1), mask=real)
            dx = tl.sum(g * b[:, None], axis=0)
            carry = g * a
            if seq_idx is not None:
                carry = tl.where(restarts(seq_idx + batch * tokens, first + count - k, tokens, REVERSE), 0.0, carry)
            exponent = carry * before  # gradient of delta A
            by_batch = (means + token * groups) * n + state
            if grad_a is not None:
                exponent += a * (share * tl.load(grad_a + by_batch, mask=real, other=0.0))[:, None]
            total_A += exponent * dt[None, :]
            ddt = tl.sum(exponent * poles, axis=0) + ut * dx
            if grad_zoh is not None:
                hold = (share * tl.load(grad_zoh + by_batch, mask=real, other=0.0))[:, None]
                ddt += tl.sum(hold * a, axis=0)
                total_A += hold * dt[None, :] * dt[None, :] * exp_slope_derivative(dt[None, :] * poles, a)
            if grad_delta is not None:
                ddt += share * tl.load(grad_delta + means + token * groups)
            if SOFTPLUS:
                ddt *= tl.sigmoid(raw + shift)
            total_bias += ddt
            total_D += dy * ut
            tl.store(ddelta + row, ddt, mask=keep)
            tl.store(du + row, dt * dx + skip * dy, mask=keep)
            h, ut, raw = before, next_u, next_raw
        tl.debug_barrier()
    tl.store(dA + own + inner, total_A, mask=tile)
    if dD is not None:
        tl.store(dD + batch * channels + channel, total_D, mask=keep)
    if ddelta_bias is not None:
        tl.store(ddelta_bias + batch * channels + channel, total_bias, mask=keep)
    tl.store(dinitial_state + own + inner, carry, mask=tile)
