"""Mamba-2's scan in chunks of tokens: products of matrices within a chunk, one state [n, head size] between chunks.

With s the running sum of delta A within a chunk and x = delta u, `y_i = exp(s_i) C_i S + sum_{j <= i} exp(s_i - s_j)
(C_i . B_j) x_j` where S is the state before the chunk. Four kernels: `similarities` (the products C_i . B_j of a
group), `chunk_states` (what each chunk adds to the state), `carry` (from chunk to chunk), `outputs`. The first three
serve the backward too. Tokens, states and channels that only fill up a tile are read as 0 and have delta = 0: they add
nothing and decay by nothing. Exponents are masked before exp, so that what no token reaches is 0 and never inf times 0.
"""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.scan import discretise


@triton.jit
def place(tokens, heads, blocks, ROWS: tl.constexpr):
    """Of this program: its chunk of a head (of [batch, chunks, heads]), batch element, head, block, tokens [ROWS]."""
    index = tl.program_id(0).to(tl.int64)
    unit = index // blocks
    chunks = tl.cdiv(tokens, ROWS)
    token = unit // heads % chunks * ROWS + tl.arange(0, ROWS)
    return unit, unit // (heads * chunks), unit % heads, index % blocks, token


@triton.jit
def tile(pointer, row, step, many_rows, column, many_columns):
    """[rows, columns] in float32, 0 outside of [many_rows, many_columns]."""
    inside = (row < many_rows)[:, None] & (column < many_columns)[None, :]
    return tl.load(pointer + row[:, None] * step + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def put(pointer, row, step, many_rows, column, many_columns, value):
    """Write what `tile` reads."""
    inside = (row < many_rows)[:, None] & (column < many_columns)[None, :]
    tl.store(pointer + row[:, None] * step + column[None, :], value, mask=inside)


@triton.jit
def steps(delta, delta_bias, head, token, tokens, delta_step, SOFTPLUS: tl.constexpr):
    """Step sizes, and what softplus took: [ROWS]; delta: of one batch element."""
    keep = token < tokens
    raw = tl.load(delta + token * delta_step + head, mask=keep, other=0.0).to(tl.float32)
    shift = tl.load(delta_bias + head).to(tl.float32) if delta_bias is not None else 0.0
    return discretise(raw, shift, keep, SOFTPLUS), raw + shift


@triton.jit
def decays(dt, A, seq_idx, batch, head, token, tokens, ROWS: tl.constexpr):
    """By what token j reaches token i [ROWS, ROWS], the state before the chunk token i, token j the state after it, and
    the one state the other; 0 across the ends of packed sequences. dt: [ROWS].
    """
    row = tl.arange(0, ROWS)
    # The running sum in two parts, so that its differences are as exact as if it were small.
    s = tl.cumsum(dt.to(tl.float64) * tl.load(A + head).to(tl.float64), axis=0)
    high = s.to(tl.float32)
    low = (s - high).to(tl.float32)
    last = row == ROWS - 1
    end_high, end_low = tl.sum(tl.where(last, high, 0.0), axis=0), tl.sum(tl.where(last, low, 0.0), axis=0)
    reaches = row[:, None] >= row[None, :]
    exponent = tl.where(reaches, (high[:, None] - high[None, :]) + (low[:, None] - low[None, :]), 0.0)
    inside = tl.where(reaches, tl.exp(exponent), 0.0)
    entering, through = tl.exp(high + low), tl.exp(end_high + end_low)
    leaving = tl.exp((end_high - high) + (end_low - low))
    if seq_idx is not None:
        seq_idx += batch * tokens
        first = tl.min(token, axis=0)
        before = tl.load(seq_idx + tl.maximum(first - 1, 0))
        after = tl.load(seq_idx + tl.minimum(first + ROWS, tokens) - 1)
        own = tl.load(seq_idx + tl.minimum(token, tokens - 1))
        inside = tl.where(own[:, None] == own[None, :], inside, 0.0)
        entering, leaving = tl.where(own == before, entering, 0.0), tl.where(own == after, leaving, 0.0)
        through = tl.where(before == after, through, 0.0)
    return inside, entering, leaving, through


# fmt: off
@triton.jit
def similarities(
    B, C, similar, B_batch, B_step, B_group, C_batch, C_step, C_group, tokens, groups, n,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
):
    # fmt: on
    """C_i . B_j of the tokens of a chunk, [b, chunks, groups, ROWS, ROWS]; one program per chunk of a group."""
    unit, batch, group, _, token = place(tokens, groups, 1, ROWS)
    B, C = B + batch * B_batch + group * B_group, C + batch * C_batch + group * C_group
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for first in range(0, n, STATES):
        state = first + tl.arange(0, STATES)
        b, c = tile(B, token, B_step, tokens, state, n), tile(C, token, C_step, tokens, state, n)
        total = tl.dot(c, tl.trans(b), total, input_precision=PRECISION)
    row = tl.arange(0, ROWS)
    tl.store(similar + unit * ROWS * ROWS + row[:, None] * ROWS + row[None, :], total)


# fmt: off
@triton.jit
def chunk_states(
    rows, values, delta, A, delta_bias, seq_idx, states, through,
    rows_batch, rows_step, rows_group, values_batch, values_step, delta_batch, delta_step,
    tokens, heads, groups, size, n,
    ENTERING: tl.constexpr, SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """What each chunk adds to the state (rows B, values u), or to the gradient of the state before it (ENTERING: rows
    C, values dy); one program per chunk of a head and block of states and channels.

    rows: [b, tokens, groups, n]; values: [b, tokens, channels]; states: [b, chunks, heads, n, size];
    through: [b, chunks, heads], by what the state before a chunk reaches the one after it.
    """
    blocks = tl.cdiv(size, COLS)
    unit, batch, head, block, token = place(tokens, heads, blocks * tl.cdiv(n, STATES), ROWS)
    column = block % blocks * COLS + tl.arange(0, COLS)
    state = block // blocks * STATES + tl.arange(0, STATES)
    dt, _ = steps(delta + batch * delta_batch, delta_bias, head, token, tokens, delta_step, SOFTPLUS)
    _, entering, leaving, past = decays(dt, A, seq_idx, batch, head, token, tokens, ROWS)
    row = tile(rows + batch * rows_batch + head // (heads // groups) * rows_group, token, rows_step, tokens, state, n)
    value = tile(values + batch * values_batch + head * size, token, values_step, tokens, column, size)
    value *= (entering if ENTERING else dt * leaving)[:, None]
    total = tl.dot(tl.trans(row), value, input_precision=PRECISION)
    put(states + unit * n * size, state, size, n, column, size, total)
    if block == 0:
        tl.store(through + unit, past)


@triton.jit
def carry(states, through, chunks, heads, elements, REVERSE: tl.constexpr, COLS: tl.constexpr):
    """From what each chunk adds to the state before each chunk, in place; REVERSE: the gradients of the state after.

    One program per batch element, head and block of the state's elements; states: [b, chunks, heads, elements].
    """
    blocks = tl.cdiv(elements, COLS)
    index = tl.program_id(0).to(tl.int64)
    head, batch = index // blocks % heads, index // (blocks * heads)
    inner = index % blocks * COLS + tl.arange(0, COLS)
    state = tl.zeros((COLS,), tl.float32)
    for i in range(chunks):
        unit = (batch * chunks + (chunks - 1 - i if REVERSE else i)) * heads + head
        at = states + unit * elements + inner
        added = tl.load(at, mask=inner < elements, other=0.0)
        tl.store(at, state, mask=inner < elements)
        state = state * tl.load(through + unit) + added


# fmt: off
@triton.jit
def outputs(
    u, delta, A, C, D, z, delta_bias, seq_idx, similar, states, y, plain,
    u_batch, u_step, delta_batch, delta_step, C_batch, C_step, C_group, z_batch, z_step,
    tokens, heads, groups, size, n,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """y, and before skip and gate `plain`; one program per chunk of a head and block of its channels."""
    unit, batch, head, block, token = place(tokens, heads, tl.cdiv(size, COLS), ROWS)
    column = block * COLS + tl.arange(0, COLS)
    group = head // (heads // groups)
    dt, _ = steps(delta + batch * delta_batch, delta_bias, head, token, tokens, delta_step, SOFTPLUS)
    inside, entering, _, _ = decays(dt, A, seq_idx, batch, head, token, tokens, ROWS)
    C, states = C + batch * C_batch + group * C_group, states + unit * n * size
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, n, STATES):
        state = first + tl.arange(0, STATES)
        c, before = tile(C, token, C_step, tokens, state, n), tile(states, state, size, n, column, size)
        total = tl.dot(c, before, total, input_precision=PRECISION)
    row = tl.arange(0, ROWS)
    similar += (unit // heads * groups + group) * ROWS * ROWS
    weights = inside * tl.load(similar + row[:, None] * ROWS + row[None, :])
    value = tile(u + batch * u_batch + head * size, token, u_step, tokens, column, size)
    total = tl.dot(weights, dt[:, None] * value, total * entering[:, None], input_precision=PRECISION)
    own, channels = batch * tokens * heads * size + head * size, heads * size
    if plain is not None:
        put(plain + own, token, channels, tokens, column, size, total)
    if D is not None:
        total += tl.load(D + head).to(tl.float32) * value
    if z is not None:
        gate = tile(z + batch * z_batch + head * size, token, z_step, tokens, column, size)
        total *= gate * tl.sigmoid(gate)
    put(y + own, token, channels, tokens, column, size, total)
