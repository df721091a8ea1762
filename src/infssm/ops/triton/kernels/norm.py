"""Residual addition and RMSNorm: a program holds whole rows of channels, COLS lanes wide."""

import triton
import triton.language as tl


@triton.jit
def forward(x, residual, weight, normed, total, scale, channels, eps, COLS: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, COLS)
    keep = channel < channels
    value = tl.load(x + row * channels + channel, mask=keep, other=0.0)
    if residual is not None:
        value += tl.load(residual + row * channels + channel, mask=keep, other=0.0)
        tl.store(total + row * channels + channel, value, mask=keep)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / channels + eps)
    tl.store(scale + row, factor)
    value *= factor * tl.load(weight + channel, mask=keep, other=0.0)
    tl.store(normed + row * channels + channel, value, mask=keep)


# fmt: off
@triton.jit
def backward(
    total, weight, scale, grad_normed, grad_total, dx, dweight, rows, channels, ROWS: tl.constexpr, COLS: tl.constexpr
):
    # fmt: on
    """One program per ROWS rows, with their share of dweight [parts, channels]."""
    part = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, COLS)
    keep = channel < channels
    weights = tl.load(weight + channel, mask=keep, other=0.0)
    share = tl.zeros((COLS,), tl.float32)
    for row in range(part * ROWS, tl.minimum(part * ROWS + ROWS, rows)):
        offset = row * channels + channel
        factor = tl.load(scale + row)
        unit = factor * tl.load(total + offset, mask=keep, other=0.0)
        grad = tl.load(grad_normed + offset, mask=keep, other=0.0)
        share += grad * unit
        grad *= weights
        grad = factor * (grad - unit * (tl.sum(grad * unit, axis=0) / channels))
        if grad_total is not None:
            grad += tl.load(grad_total + offset, mask=keep, other=0.0)
        tl.store(dx + offset, grad, mask=keep)
    tl.store(dweight + part * channels + channel, share, mask=keep)
