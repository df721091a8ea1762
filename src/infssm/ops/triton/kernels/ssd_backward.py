"""Mamba-2's scan in chunks, backward: each chunk anew from the state before it and the gradient of the state after it.

The gradient of delta_t A is the sum of all that passes token t: what tokens before it send to tokens from it on, to the
state after the chunk, and what the state before the chunk sends to tokens from it on and through. Each is summed by
itself, because as a difference of larger sums it would lose what strong decays leave of it.
"""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.ssd import decays, place, put, steps, tile


# fmt: off
@triton.jit
def gate(
    grad, u, z, D, plain, dy, dz, y_batch, y_step, u_batch, u_step, z_batch, z_step, tokens, heads, size,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """Gradients of the gate and of what it multiplies; one program per chunk of a head and block of its channels."""
    _, batch, head, block, token = place(tokens, heads, tl.cdiv(size, COLS), ROWS)
    column = block * COLS + tl.arange(0, COLS)
    own, channels = (batch * tokens * heads + head) * size, heads * size
    g = tile(grad + batch * y_batch + head * size, token, y_step, tokens, column, size)
    opened = tile(z + batch * z_batch + head * size, token, z_step, tokens, column, size)
    y = tile(plain + own, token, channels, tokens, column, size)
    if D is not None:
        value = tile(u + batch * u_batch + head * size, token, u_step, tokens, column, size)
        y += tl.load(D + head).to(tl.float32) * value
    sigmoid = tl.sigmoid(opened)
    put(dy + own, token, channels, tokens, column, size, g * opened * sigmoid)
    put(dz + own, token, channels, tokens, column, size, g * y * sigmoid * (1.0 + opened * (1.0 - sigmoid)))


# fmt: off
@triton.jit
def inputs(
    u, delta, A, B, C, D, delta_bias, seq_idx, similar, states, pulled, dy, du, ddelta, dA, dD,
    u_batch, u_step, delta_batch, delta_step, B_batch, B_step, B_group, C_batch, C_step, C_group, y_batch, y_step,
    tokens, heads, groups, size, n,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """du, ddelta, and per chunk dA and dD [b, chunks, heads]; one program per chunk of a head.

    states: the state before each chunk; pulled: the gradient of the state after it, [b, chunks, heads, n, size].
    """
    unit, batch, head, _, token = place(tokens, heads, 1, ROWS)
    group, row = head // (heads // groups), tl.arange(0, ROWS)
    dt, raw = steps(delta + batch * delta_batch, delta_bias, head, token, tokens, delta_step, SOFTPLUS)
    inside, entering, leaving, through = decays(dt, A, seq_idx, batch, head, token, tokens, ROWS)
    B, C = B + batch * B_batch + group * B_group, C + batch * C_batch + group * C_group
    u, dy = u + batch * u_batch + head * size, dy + batch * y_batch + head * size
    du += (batch * tokens * heads + head) * size
    states, pulled = states + unit * n * size, pulled + unit * n * size
    similar += (unit // heads * groups + group) * ROWS * ROWS
    weights = inside * tl.load(similar + row[:, None] * ROWS + row[None, :])
    skip = tl.load(D + head).to(tl.float32) if D is not None else 0.0
    pairs = tl.zeros((ROWS, ROWS), tl.float32)  # dy_i . x_j
    entered = tl.zeros((ROWS,), tl.float32)  # what the state before the chunk gives token i, times its gradient
    left = tl.zeros((ROWS,), tl.float32)  # what token j gives the state after the chunk, times its gradient
    ddt = tl.zeros((ROWS,), tl.float32)
    passed, skipped = 0.0, 0.0
    for begin in range(0, size, COLS):
        column = begin + tl.arange(0, COLS)
        value, g = tile(u, token, u_step, tokens, column, size), tile(dy, token, y_step, tokens, column, size)
        sent, received = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, n, STATES):
            state = first + tl.arange(0, STATES)
            before, after = tile(states, state, size, n, column, size), tile(pulled, state, size, n, column, size)
            b, c = tile(B, token, B_step, tokens, state, n), tile(C, token, C_step, tokens, state, n)
            sent = tl.dot(b, after, sent, input_precision=PRECISION)
            received = tl.dot(c, before, received, input_precision=PRECISION)
            passed += tl.sum(before * after)
        sent *= leaving[:, None]
        entered += entering * tl.sum(g * received, axis=1)
        left += dt * tl.sum(value * sent, axis=1)
        pairs = tl.dot(g, tl.trans(dt[:, None] * value), pairs, input_precision=PRECISION)
        dx = tl.dot(tl.trans(weights), g, sent, input_precision=PRECISION)
        ddt += tl.sum(value * dx, axis=1)
        skipped += tl.sum(value * g)
        put(du, token, heads * size, tokens, column, size, dt[:, None] * dx + skip * g)
    # Sums over i >= t, then over j < t.
    later = tl.cumsum(pairs * weights, axis=0, reverse=True) + left[None, :]
    past = tl.sum(tl.where(row[:, None] > row[None, :], later, 0.0), axis=1)
    past += tl.cumsum(entered, axis=0, reverse=True) + through * passed
    ddt += past * tl.load(A + head).to(tl.float32)
    if SOFTPLUS:
        ddt *= tl.sigmoid(raw)
    tl.store(ddelta + (batch * tokens + token) * heads + head, ddt, mask=token < tokens)
    tl.store(dA + unit, tl.sum(past * dt, axis=0))
    if dD is not None:
        tl.store(dD + unit, skipped)


# fmt: off
@triton.jit
def projections(
    u, delta, A, B, C, delta_bias, seq_idx, states, pulled, dy, dB, dC,
    u_batch, u_step, delta_batch, delta_step, B_batch, B_step, B_group, C_batch, C_step, C_group, y_batch, y_step,
    tokens, heads, groups, size, n,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """dB and dC, summed over the heads of a group; one program per chunk of a group and block of states."""
    unit, batch, group, block, token = place(tokens, groups, tl.cdiv(n, STATES), ROWS)
    state = block * STATES + tl.arange(0, STATES)
    u, dy, delta = u + batch * u_batch, dy + batch * y_batch, delta + batch * delta_batch
    many = heads // groups
    total_B, total_C = tl.zeros((ROWS, STATES), tl.float32), tl.zeros((ROWS, STATES), tl.float32)
    total = tl.zeros((ROWS, ROWS), tl.float32)  # gradient of C_i . B_j
    for head in range(group * many, group * many + many):
        dt, _ = steps(delta, delta_bias, head, token, tokens, delta_step, SOFTPLUS)
        inside, entering, leaving, _ = decays(dt, A, seq_idx, batch, head, token, tokens, ROWS)
        own = (unit // groups * heads + head) * n * size
        pairs = tl.zeros((ROWS, ROWS), tl.float32)
        for begin in range(0, size, COLS):
            column = begin + tl.arange(0, COLS)
            x = dt[:, None] * tile(u + head * size, token, u_step, tokens, column, size)
            g = tile(dy + head * size, token, y_step, tokens, column, size)
            before = tile(states + own, state, size, n, column, size)
            after = tile(pulled + own, state, size, n, column, size)
            pairs = tl.dot(g, tl.trans(x), pairs, input_precision=PRECISION)
            total_B = tl.dot(x * leaving[:, None], tl.trans(after), total_B, input_precision=PRECISION)
            total_C = tl.dot(g * entering[:, None], tl.trans(before), total_C, input_precision=PRECISION)
        total += pairs * inside
    b = tile(B + batch * B_batch + group * B_group, token, B_step, tokens, state, n)
    c = tile(C + batch * C_batch + group * C_group, token, C_step, tokens, state, n)
    total_B = tl.dot(tl.trans(total), c, total_B, input_precision=PRECISION)
    total_C = tl.dot(total, b, total_C, input_precision=PRECISION)
    own = (batch * tokens * groups + group) * n
    put(dB + own, token, groups * n, tokens, state, n, total_B)
    put(dC + own, token, groups * n, tokens, state, n, total_C)
