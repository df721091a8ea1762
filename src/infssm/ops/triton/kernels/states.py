"""Mean states without a scan, in tiles [STATES, COLS] as in the scan; a row is one token of one batch element."""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.math import exp_slope, exp_slope_derivative
from infssm.ops.triton.kernels.scan import discretise, place


# fmt: off
@triton.jit
def forward(
    delta, A, bias, a_mean, delta_mean, zoh_mean, delta_batch, delta_step, tokens, groups, size, n,
    SOFTPLUS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """One program per row and group, which walks over the channels. A: [n, channels]; means: [rows, groups, n]."""
    offset = tl.program_id(0).to(tl.int64)
    row, group = offset // groups, offset % groups
    channels = groups * size
    state = tl.arange(0, STATES)
    delta += row // tokens * delta_batch + row % tokens * delta_step
    total_a = tl.zeros((STATES, COLS), tl.float32)
    total_zoh = tl.zeros((STATES, COLS), tl.float32)
    total_delta = tl.zeros((COLS,), tl.float32)
    for first in range(0, size, COLS):
        inside = first + tl.arange(0, COLS)
        keep = inside < size
        channel = tl.max_contiguous((group * size).to(tl.int32) + inside, 1)
        tile = (state < n)[:, None] & keep[None, :]
        shift = tl.load(bias + channel, mask=keep, other=0.0) if bias is not None else 0.0
        dt = discretise(tl.load(delta + channel, mask=keep, other=0.0), shift, keep, SOFTPLUS)
        poles = tl.load(A + state[:, None] * channels + channel[None, :], mask=tile, other=0.0)
        a = tl.exp(dt[None, :] * poles)
        total_delta += dt
        total_a += tl.where(tile, a, 0.0)
        if zoh_mean is not None:
            total_zoh += dt[None, :] * exp_slope(dt[None, :] * poles, a)
    share = 1.0 / size
    tl.store(delta_mean + offset, share * tl.sum(total_delta, axis=0))
    tl.store(a_mean + offset * n + state, share * tl.sum(total_a, axis=1), mask=state < n)
    if zoh_mean is not None:
        tl.store(zoh_mean + offset * n + state, share * tl.sum(total_zoh, axis=1), mask=state < n)


# fmt: off
@triton.jit
def backward(
    delta, A, bias, grad_a, grad_delta, grad_zoh, ddelta, dA, dbias,
    delta_batch, delta_step, batches, tokens, groups, size, n,
    SOFTPLUS: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """One program per ROWS rows and block of channels; dA [parts, n, channels] and dbias [parts, channels] per ROWS."""
    part, group, _, channel, keep = place(groups, size, COLS)
    channels = groups * size
    state = tl.arange(0, STATES)
    real = state < n
    tile = real[:, None] & keep[None, :]
    inner = state[:, None] * channels + channel[None, :]
    poles = tl.load(A + inner, mask=tile, other=0.0)
    shift = tl.load(bias + channel, mask=keep, other=0.0) if bias is not None else 0.0
    total_A = tl.zeros((STATES, COLS), tl.float32)
    total_bias = tl.zeros((COLS,), tl.float32)
    share = 1.0 / size
    for row in range(part * ROWS, tl.minimum(part * ROWS + ROWS, batches * tokens)):
        raw = tl.load(delta + row // tokens * delta_batch + row % tokens * delta_step + channel, mask=keep, other=0.0)
        dt = discretise(raw, shift, keep, SOFTPLUS)
        a = tl.exp(dt[None, :] * poles)
        offset = row * groups + group
        ddt = tl.zeros((COLS,), tl.float32)
        if grad_delta is not None:
            ddt += share * tl.load(grad_delta + offset)
        if grad_a is not None:
            by_exponent = a * (share * tl.load(grad_a + offset * n + state, mask=real, other=0.0))[:, None]
            ddt += tl.sum(by_exponent * poles, axis=0)
            total_A += by_exponent * dt[None, :]
        if grad_zoh is not None:
            hold = (share * tl.load(grad_zoh + offset * n + state, mask=real, other=0.0))[:, None]
            ddt += tl.sum(hold * a, axis=0)
            total_A += hold * dt[None, :] * dt[None, :] * exp_slope_derivative(dt[None, :] * poles, a)
        if SOFTPLUS:
            ddt *= tl.sigmoid(raw + shift)
        total_bias += ddt
        tl.store(ddelta + row * channels + channel, ddt, mask=keep)
    tl.store(dA + part * n * channels + inner, total_A, mask=tile)
    if dbias is not None:
        tl.store(dbias + part * channels + channel, total_bias, mask=keep)
