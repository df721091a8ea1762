"""Causal depthwise convolution: tiles of ROWS tokens and COLS channels, one product per tap."""

import triton
import triton.language as tl


@triton.jit
def place(tokens, channels, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Batch element, part (of all pieces of ROWS tokens), tokens and channels of this program."""
    blocks = tl.cdiv(channels, COLS)
    part = tl.program_id(0) // blocks
    pieces = tl.cdiv(tokens, ROWS)
    token = part % pieces * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    return (part // pieces).to(tl.int64), part.to(tl.int64), token, channel


@triton.jit
def tap(x, seq, step, token, tokens, channel, channels, k, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """The input of weight k: the token WIDTH - 1 - k before (REVERSE: after) each token, 0 outside the sequence."""
    source = token + (WIDTH - 1 - k) if REVERSE else token - (WIDTH - 1 - k)
    inside = (source >= 0) & (source < tokens) & (token < tokens)
    if seq is not None:
        inside &= tl.load(seq + source, mask=inside, other=0.0) == tl.load(seq + token, mask=inside, other=0.0)
    mask = inside[:, None] & (channel < channels)[None, :]
    return tl.load(x + source[:, None] * step + channel[None, :], mask=mask, other=0.0)


@triton.jit
def convolve(x, weight, bias, seq, step, token, tokens, channel, channels, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution of a tile before SiLU; weight: [WIDTH, channels]."""
    keep = channel < channels
    total = tl.load(bias + channel, mask=keep, other=0.0)[None, :] if bias is not None else 0.0
    for k in tl.static_range(WIDTH):
        factor = tl.load(weight + k * channels + channel, mask=keep, other=0.0)
        total += factor[None, :] * tap(x, seq, step, token, tokens, channel, channels, k, REVERSE, WIDTH)
    return total


# fmt: off
@triton.jit
def forward(
    x, weight, bias, seq, y, x_batch, x_step, tokens, channels,
    SILU: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """y: [batch, tokens, channels]."""
    batch, _, token, channel = place(tokens, channels, ROWS, COLS)
    mask = (token < tokens)[:, None] & (channel < channels)[None, :]
    if seq is not None:
        seq += batch * tokens
    total = convolve(x + batch * x_batch, weight, bias, seq, x_step, token, tokens, channel, channels, REVERSE, WIDTH)
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(y + (batch * tokens + token[:, None]) * channels + channel[None, :], total, mask=mask)


# fmt: off
@triton.jit
def backward(
    x, weight, bias, seq, grad, before, dweight, dbias,
    x_batch, x_step, grad_batch, grad_step, tokens, channels,
    SILU: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    # fmt: on
    """The gradient before SiLU, and of this part's tokens dweight [parts, WIDTH, channels] and dbias [parts, channels].

    The gradient of x is the convolution of `before` the other way.
    """
    batch, part, token, channel = place(tokens, channels, ROWS, COLS)
    keep = channel < channels
    mask = (token < tokens)[:, None] & keep[None, :]
    x += batch * x_batch
    if seq is not None:
        seq += batch * tokens
    g = tl.load(grad + batch * grad_batch + token[:, None] * grad_step + channel[None, :], mask=mask, other=0.0)
    if SILU:
        total = convolve(x, weight, bias, seq, x_step, token, tokens, channel, channels, REVERSE, WIDTH)
        sigmoid = tl.sigmoid(total)
        g *= sigmoid * (1.0 + total * (1.0 - sigmoid))
    tl.store(before + (batch * tokens + token[:, None]) * channels + channel[None, :], g, mask=mask)
    for k in tl.static_range(WIDTH):
        product = g * tap(x, seq, x_step, token, tokens, channel, channels, k, REVERSE, WIDTH)
        tl.store(dweight + (part * WIDTH + k) * channels + channel, tl.sum(product, axis=0), mask=keep)
    if dbias is not None:
        tl.store(dbias + part * channels + channel, tl.sum(g, axis=0), mask=keep)
