"""Distances that see C (and B): `simplified`, `aligned` and `output` (docs/reference/maths.md, section 5).

All three are quadratic forms of the kernel ``1 / (1 - conj(a_i) b_j)``. They are written through differences of the two
systems, so that no digits cancel near equality: value and gradient of `aligned` and `output` are exactly 0 there.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.distances._matrices import abs2, add, cauchy, dagger, form, gaps, real
from infssm.ops.distances._pair import Pair
from infssm.ops.distances.pieces import in_pieces
from infssm.ops.distances.table import kind

# Share of the systems' own size from which on their difference is taken directly: differences of poles at opposite ends
# of the unit interval are large numbers in the half-plane, and what is exact near equality would cancel.
_FAR = 0.1
_STRAIN = 1e4  # least |s - r|^2 / (r s) at which that matters

_of_grams = partial(kind, sees="ac", unchanged_by="permutation, signs and scale of c", backends=("cpu", "triton"))


@_of_grams(
    "simplified",
    summary="the paper's training loss, 1 - tr(G3 G4) / (tr G1 tr G2); not 0 at equality. To reproduce.",
)
def simplified(pair: Pair, *, equality: str = "token") -> Tensor:
    """The paper's distance ``1 - tr(G3 G4) / (tr G1 tr G2)``, written as eq. 20, which has no cancellation.

    equality: where the paper's special case (0 where old and new agree to rtol 1e-5, atol 1e-8) applies: "token"
    (each leading index separately), "tensor" (all or nothing, as in the authors' code) or "off".
    """
    if equality not in ("token", "tensor", "off"):
        raise ConfigError(f"distance: equality must be 'token', 'tensor' or 'off', got {equality!r}")
    value = _mean_gap(pair)
    if equality == "off":
        return value
    same = _agree(pair)
    return torch.where(same.all() if equality == "tensor" else same, torch.zeros_like(value), value)


def _agree(pair: Pair) -> Tensor:
    states = (pair.old_a, pair.old_c, pair.new_a, pair.new_c)
    old_a, old_c, new_a, new_c = (torch.tanh(x / 2) if pair.normalised else x for x in states)
    return torch.isclose(new_a, old_a).all(-1) & torch.isclose(new_c, old_c).all(-1)


@in_pieces
def _mean_gap(pair: Pair) -> Tensor:
    r, s, shift = pair.poles()
    p, q = (pair.per_pole(abs2(c)) * abs2(1 + x) / real(x) for c, x in zip(_balanced(pair)[:2], (r, s), strict=True))
    gap = abs2(gaps(r, s, shift) * cauchy(r, s))
    return form(p, gap, q) / _nonzero(p.sum(0) * q.sum(0))


@_of_grams(
    "aligned",
    summary="1 - cos of the angle between the Gram operators O O^T of the two systems; sees A and C",
)
@in_pieces
def aligned(pair: Pair) -> Tensor:
    """``1 - tr(G3 G4) / (|G1|_F |G2|_F)``: 0 exactly when ``O O^H`` and its new counterpart are proportional.

    It is 1 - cos of the angle between ``f = sum_i p_i k(r_i, .)`` and g, likewise of the new system (eq. 22). The sine
    comes from the residual ``g - t f``, ``t = <f, g> / <f, f>`` (eq. 24).
    """
    r, s, shift = pair.poles()
    c, d, gap = _balanced(pair)
    p = pair.per_pole(abs2(c))
    new_p = pair.per_pole(abs2(d))
    change = pair.per_pole(real(gap * (c + d).conj())) * abs2(1 + s) + p * real(shift * (2 + r + s).conj())  # q - p
    silent = (p.sum(0) == 0) | (new_p.sum(0) == 0)  # nothing to compare: the distance is 0, not NaN
    p, q = p * abs2(1 + r), new_p * abs2(1 + s)
    aa, ab, bb = cauchy(r, r), cauchy(r, s), cauchy(s, s)
    ba = dagger(ab)
    ff, gg = (torch.where(silent, 1, form(x, abs2(k), x)) for x, k in ((p, aa), (q, bb)))
    extra = form(p, abs2(ab), change) - form(p, ab * aa * (ab + aa).conj(), p * shift)  # <f, g - f>
    excess = extra / ff  # t - 1
    change, pull = change - excess * p, (1 + excess) * p * shift
    residual = form(change, abs2(bb), change) - 2 * form(change, bb * ba * (bb + ba).conj(), pull)
    residual = residual + form(pull, _mixed(r, s, aa * ab * ba * bb) * (aa + bb).conj(), pull)
    residual = residual + 2 * form(pull.conj(), abs2(ab) * (aa * bb.conj()), pull)
    near = residual.clamp_min(0) / (gg + (ff + extra) * (gg / ff).sqrt())
    far = 1 - form(p, abs2(ab), q) / (ff.sqrt() * gg.sqrt())
    value = torch.where(far.detach() > _FAR, far, near)
    return torch.where(silent, torch.zeros_like(value), value)


@kind(
    "output",
    sees="acb",
    unchanged_by="any change of coordinates of the state",
    backends=("cpu", "triton"),
    summary="how far the outputs after one impulse differ, squared and summed over all time; sees A, B, C. To use.",
)
@in_pieces
def output(pair: Pair) -> Tensor:
    """Energy of the difference of the two impulse responses, ``sum_t |c a^t b - c' a'^t b'|^2`` (eq. 28)."""
    (b, g, gap_b), (c, d, gap_c) = pair.columns(), pair.rows()
    r, s, shift = pair.poles()
    residue = pair.per_pole(c * b)
    change = pair.per_pole(gap_c * g + c * gap_b) * (1 + s) + residue * shift
    moved = residue * (1 + r) * shift
    aa, ab, bb = cauchy(r, r), cauchy(r, s), cauchy(s, s)
    ba = dagger(ab)
    near = form(change, bb, change) - 2 * form(change, bb * ba, moved)
    near = (near + form(moved, _mixed(r, s, aa * ab * ba * bb), moved)).clamp_min(0)
    p, q = residue * (1 + r), pair.per_pole(d * g) * (1 + s)
    own = form(p, aa, p) + form(q, bb, q)
    far = own - 2 * form(p, ab, q)
    apart = (abs2(shift) / (real(r) * real(s))).detach().amax(0) > _STRAIN
    return torch.where(apart & (far.detach() > _FAR * own.detach()), far, near) / 2


def _mixed(r: Tensor, s: Tensor, product: Tensor) -> Tensor:
    """``(bb - ab - ba + aa) / (conj(shift_i) shift_j)`` of Cauchy kernels whose product is given, ``[n, n, ...]``."""
    return add(r + s, r + s) * product


def _balanced(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Output rows c, d and d - c, each side times a power of two that brings the largest entries to about 1.

    `simplified` and `aligned` do not depend on either scale; so squares neither overflow nor lose the smaller system.
    Sides of about equal size get the same factor, and d - c keeps its precision.
    """
    c, d, gap = pair.rows()
    old, new = (_nonzero(x.detach().abs().amax(0)) for x in (c, d))
    level, ratio = torch.frexp(old).exponent, torch.log2(new / old).round()
    scale, new_scale = (torch.ldexp(torch.ones_like(old), -power) for power in (level, level + ratio))
    c, d = c * scale, d * new_scale
    return c, d, torch.where(ratio == 0, gap * scale, d - c)


def _nonzero(x: Tensor) -> Tensor:
    """1 in place of 0: a system whose c is all zero has nothing to compare, and its distance is 0, not NaN."""
    return torch.where(x == 0, torch.ones_like(x), x)
