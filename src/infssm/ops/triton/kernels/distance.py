"""Distances between old and new states (a, c, b): soft-normalisation if SOFT, value and derivatives in one pass.

A program takes ROWS tokens, one per lane: its tiles are [STATES, ROWS], so that a thread holds the states of a token in
registers and meets each of them with every state of the other side, one after the other, read again from the cache.
Old poles a and rows c, new poles b and rows d, all soft-normalised.
"""

import triton
import triton.language as tl

from infssm.ops.triton.kernels.math import log1p_series, soft_normalize


@triton.jit
def pair(old, new, offset, mask, SOFT: tl.constexpr, WIDE: tl.constexpr):
    """Old and new values and old - new, which keeps its precision where they are close.

    tanh(x/2) - tanh(y/2) = tanh((x-y)/2) (1 - tanh(x/2) tanh(y/2)).
    """
    p, q = tl.load(old + offset, mask=mask, other=0.0), tl.load(new + offset, mask=mask, other=0.0)
    gap = p - q
    if SOFT:
        p, q = soft_normalize(p), soft_normalize(q)
        gap = soft_normalize(gap) * (1.0 - p * q)
    if WIDE:
        p, gap = p.to(tl.float64), gap.to(tl.float64)
        q = p - gap
    return p, q, gap


@triton.jit
def place(rows, n, ROWS: tl.constexpr, STATES: tl.constexpr):
    """The tokens of this program, its states, and which of them exist; neither counts as contiguous (see the scan)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    state = tl.max_contiguous(tl.arange(0, STATES), 1)
    return row, row < rows, state[:, None], (state < n)[:, None] & (row < rows)[None, :]


@triton.jit
def store_slope(out, slope, value, row, keep, state, mask, count, SOFT: tl.constexpr):
    """Write the derivative in the given value; a scalar transition (count 1) adds up over the states it serves."""
    if SOFT:
        slope *= 0.5 - 0.5 * value * value
    slope = tl.where(mask, slope, 0.0).to(tl.float32)
    if count == 1:
        tl.store(out + row, tl.sum(slope, axis=0), mask=keep)
    else:
        tl.store(out + row[None, :] * count + state, slope, mask=mask)


@triton.jit
def overlap(
    x, old_a, new_a, old_c, new_c, row, keep, poles, n, SOFT: tl.constexpr, NEW: tl.constexpr, WIDE: tl.constexpr
):
    """Sum over the states of the old (NEW: the new) side of weight / (1 - pole x)^2, and its derivative in x."""
    q, r = tl.zeros_like(x), tl.zeros_like(x)
    for k in range(n):
        a, b, _ = pair(old_a, new_a, row * poles + tl.minimum(k, poles - 1), keep, SOFT, WIDE)
        c, d, _ = pair(old_c, new_c, row * n + k, keep, SOFT, WIDE)
        pole = b if NEW else a
        weight = d * d if NEW else c * c
        inverse = 1.0 / (1.0 - pole[None, :] * x)
        term = weight[None, :] * inverse * inverse
        q += term
        r += term * inverse * (2.0 * pole)[None, :]
    return q, r


# fmt: off
@triton.jit
def gram(
    old_a, old_c, new_a, new_c, value, d_old_a, d_old_c, d_new_a, d_new_c, rows, poles, n,
    ALIGNED: tl.constexpr, SOFT: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
):
    # fmt: on
    """1 - cross / (norm of old, norm of new): Frobenius norms of the Grams (ALIGNED, in float64) or their traces."""
    row, keep, state, mask = place(rows, n, ROWS, STATES)
    a, b, _ = pair(old_a, new_a, row[None, :] * poles + tl.minimum(state, poles - 1), mask, SOFT, ALIGNED)
    c, d, _ = pair(old_c, new_c, row[None, :] * n + state, mask, SOFT, ALIGNED)
    if ALIGNED:
        old_q, old_r = overlap(a, old_a, new_a, old_c, new_c, row, keep, poles, n, SOFT, False, True)
        new_q, new_r = overlap(b, old_a, new_a, old_c, new_c, row, keep, poles, n, SOFT, True, True)
    else:
        old_q, new_q = 1.0 / (1.0 - a * a), 1.0 / (1.0 - b * b)
        old_r, new_r = 2.0 * a * old_q * old_q, 2.0 * b * new_q * new_q
    old_own = tl.where(keep, tl.sum(c * c * old_q, axis=0), 1.0)
    new_own = tl.where(keep, tl.sum(d * d * new_q, axis=0), 1.0)
    q, r = overlap(b, old_a, new_a, old_c, new_c, row, keep, poles, n, SOFT, False, ALIGNED)
    scale = 1.0 / tl.sqrt(old_own * new_own) if ALIGNED else 1.0 / (old_own * new_own)
    cosine = tl.sum(d * d * q, axis=0) * scale
    result = 1.0 - cosine
    apart = keep
    if not ALIGNED:  # torch.isclose's rule, per token: equal states have no distance and no derivative
        same_a = tl.abs(a - b) <= 1e-8 + 1e-5 * tl.abs(b)
        same_c = tl.abs(c - d) <= 1e-8 + 1e-5 * tl.abs(d)
        apart = tl.sum(tl.where(same_a & same_c, 0, 1), axis=0) > 0
        result = tl.where(apart, result, 0.0)
    tl.store(value + row, result.to(tl.float32), mask=keep)
    if d_new_a is not None:
        share, cross = (cosine / new_own)[None, :], scale[None, :]
        by_pole = tl.where(apart[None, :], d * d * (share * new_r - cross * r), 0.0)
        by_row = tl.where(apart[None, :], 2.0 * d * (share * new_q - cross * q), 0.0)
        store_slope(d_new_a, by_pole, b, row, keep, state, mask, poles, SOFT)
        store_slope(d_new_c, by_row, d, row, keep, state, mask, n, SOFT)
    if d_old_a is not None:
        q, r = overlap(a, old_a, new_a, old_c, new_c, row, keep, poles, n, SOFT, True, ALIGNED)
        share, cross = (cosine / old_own)[None, :], scale[None, :]
        by_pole = tl.where(apart[None, :], c * c * (share * old_r - cross * r), 0.0)
        by_row = tl.where(apart[None, :], 2.0 * c * (share * old_q - cross * q), 0.0)
        store_slope(d_old_a, by_pole, a, row, keep, state, mask, poles, SOFT)
        store_slope(d_old_c, by_row, c, row, keep, state, mask, n, SOFT)


@triton.jit
def martin(
    old_a, new_a, value, d_old_a, d_new_a, rows, n, SOFT: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr
):
    """sum_ij log1p(gap_i gap_j / ((1 - a_i a_j)(1 - b_i b_j))); the derivatives are sums over one index."""
    row, keep, state, mask = place(rows, n, ROWS, STATES)
    a, b, gap = pair(old_a, new_a, row[None, :] * n + state, mask, SOFT, False)
    total, old_slope, new_slope = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    for k in range(n):
        a_k, b_k, gap_k = pair(old_a, new_a, row * n + k, keep, SOFT, False)
        a_k, b_k, gap_k = a_k[None, :], b_k[None, :], gap_k[None, :]
        product = gap * gap_k
        base = (1.0 - a * a_k) * (1.0 - b * b_k)
        s = product / (2.0 * base + product)
        total += tl.where(tl.abs(s) <= 0.33, log1p_series(s), tl.log(1.0 + product / base))
        old_slope += 2.0 * gap_k / ((1.0 - a * a_k) * (1.0 - a * b_k))
        new_slope -= 2.0 * gap_k / ((1.0 - b * a_k) * (1.0 - b * b_k))
    tl.store(value + row, tl.sum(total, axis=0), mask=keep)
    if d_old_a is not None:
        store_slope(d_old_a, old_slope, a, row, keep, state, mask, n, SOFT)
    if d_new_a is not None:
        store_slope(d_new_a, new_slope, b, row, keep, state, mask, n, SOFT)


@triton.jit
def residues(old_a, old_c, old_b, new_a, new_c, new_b, offset, mask, SOFT: tl.constexpr):
    """Old and new pole, the gap between the residues c b and that between the poles times the old residue; d and g."""
    a, x, gap_a = pair(old_a, new_a, offset, mask, SOFT, False)
    c, d, gap_c = pair(old_c, new_c, offset, mask, SOFT, False)
    b, g, gap_b = pair(old_b, new_b, offset, mask, SOFT, False)
    return a, x, -(gap_c * g + c * gap_b), -c * b * gap_a, d, g


# fmt: off
@triton.jit
def output(
    old_a, old_c, old_b, new_a, new_c, new_b, value, da, dc, db, rows, n,
    SOFT: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
):
    # fmt: on
    """Energy of the difference of two impulse responses, from differences only: nothing cancels near equality.

    With e = d g - c b, m = c b (x - a), and U(y) = sum_k e_k B_k + m_k y A_k B_k, A_k = 1 / (1 - a_k y),
    B_k = 1 / (1 - x_k y), it is the sum over the states of e U(x) + m (U(x) - U(a)) / (x - a).
    """
    row, keep, state, mask = place(rows, n, ROWS, STATES)
    offset = row[None, :] * n + state
    a, x, e, m, d, g = residues(old_a, old_c, old_b, new_a, new_c, new_b, offset, mask, SOFT)
    total, divided, slope = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    for k in range(n):
        a_k, x_k, e_k, m_k, _, _ = residues(old_a, old_c, old_b, new_a, new_c, new_b, row * n + k, keep, SOFT)
        a_k, x_k, e_k, m_k = a_k[None, :], x_k[None, :], e_k[None, :], m_k[None, :]
        A, B = 1.0 / (1.0 - a_k * x), 1.0 / (1.0 - x_k * x)
        old_A, old_B = 1.0 / (1.0 - a_k * a), 1.0 / (1.0 - x_k * a)
        total += e_k * B + m_k * (x * A * B)
        divided += e_k * x_k * (B * old_B) + m_k * ((1.0 - (a_k * x_k) * (a * x)) * (A * B * old_A * old_B))
        slope += e_k * x_k * (B * B) + m_k * (A * B * (A + B - 1.0))
    energy = tl.sum(e * total + m * divided, axis=0)
    tl.store(value + row, tl.where(energy < 0.0, 0.0, energy), mask=keep)
    if da is not None:
        store_slope(da, 2.0 * d * g * slope, x, row, keep, state, mask, n, SOFT)
        store_slope(dc, 2.0 * total * g, d, row, keep, state, mask, n, SOFT)
        store_slope(db, 2.0 * total * d, g, row, keep, state, mask, n, SOFT)
