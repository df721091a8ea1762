"""Functions the kernels share, built only from exp and division: log1p, expm1 and tanh would lose small values."""

import triton
import triton.language as tl


@triton.jit
def log1p_series(s):
    """log1p(x) for s = x / (2 + x), |s| <= 1/3: 2 atanh(s)."""
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))))))
    return 2.0 * s * series


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with full relative precision for very negative x."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + log1p_series(e / (2.0 + e))


@triton.jit
def exp_slope(x, e):
    """(e - 1) / x for e = exp(x); its series near 0."""
    near = tl.abs(x) < 0.5
    series = 1.0 + x / 9
    series = 1.0 + x / 8 * series
    series = 1.0 + x / 7 * series
    series = 1.0 + x / 6 * series
    series = 1.0 + x / 5 * series
    series = 1.0 + x / 4 * series
    series = 1.0 + x / 3 * series
    series = 1.0 + x / 2 * series
    return tl.where(near, series, (e - 1.0) / tl.where(near, 1.0, x))


@triton.jit
def exp_slope_derivative(x, e):
    """Derivative of (exp(x) - 1) / x, with e = exp(x): the series of k x^(k-1) / (k+1)! near 0."""
    near = tl.abs(x) < 0.5
    series = 1 / 144 + x * (1 / 840 + x * (1 / 5760 + x / 45360))
    series = 1 / 2 + x * (1 / 3 + x * (1 / 8 + x * (1 / 30 + x * series)))
    return tl.where(near, series, (e - exp_slope(x, e)) / tl.where(near, 1.0, x))


@triton.jit
def soft_normalize(x):
    """tanh(x / 2) = (1 - exp(-|x|)) / (1 + exp(-|x|)), with the sign of x."""
    size = tl.abs(x)
    e = tl.exp(-size)
    numerator = tl.where(size < 0.5, size * exp_slope(-size, e), 1.0 - e)
    value = numerator / (1.0 + e)
    return tl.where(x < 0.0, -value, value)
