"""Distances that see C (and B): `simplified`, `aligned` and `output`.

All three are quadratic forms of ``1 / (1 - a_i b_j)``. They are written through differences of the two systems, so that
no digits cancel near equality: value and gradient of `aligned` and `output` are exactly 0 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.geometry._chunks import per_token
from infssm.geometry._fused import fused
from infssm.geometry._pairwise import abs2, dagger, form, outer, real, states_first, szego
from infssm.geometry._registry import register_distance
from infssm.geometry._space import StateSpace


@register_distance("simplified")
@fused("simplified")
def simplified(old: StateSpace, new: StateSpace, *, equality: str = "token") -> Tensor:
    """The paper's distance ``1 - tr(G3 G4) / (tr G1 tr G2)``: not 0 at equality but for its special case.

    With ``p_i = |c_i|^2 / (1 - |a_i|^2)`` scaled to sum 1 (and q likewise) it equals
    ``sum_ij p_i q_j |a_i - b_j|^2 / |1 - conj(a_i) b_j|^2``, which has no cancellation.

    Args:
        old: ``a, c [..., n]``.
        new: ``a, c [..., n]``.
        equality: where the paper's special case (0 where old and new agree to rtol 1e-5, atol 1e-8) applies: "token"
            (each leading index by itself), "tensor" (all or nothing, as in the authors' code) or "off".
    """
    if equality not in ("token", "tensor", "off"):
        raise ConfigError(f"distance: equality must be 'token', 'tensor' or 'off', got {equality!r}")
    value = _mean_gap(old, new)
    if equality == "off":
        return value
    same = torch.isclose(new.a, old.a).all(-1) & torch.isclose(new.c, old.c).all(-1)
    return torch.where(same.all() if equality == "tensor" else same, torch.zeros_like(value), value)


@per_token
def _mean_gap(old: StateSpace, new: StateSpace) -> Tensor:
    a, b, p, q = states_first(old.a, new.a, _mass(old), _mass(new))
    gap = abs2((a.unsqueeze(1) - b.unsqueeze(0)) * szego(a, b))
    return form(p, gap, q) / _nonzero(p.sum(0) * q.sum(0))


@register_distance("aligned")
@fused("aligned")
@per_token
def aligned(old: StateSpace, new: StateSpace) -> Tensor:
    """``1 - tr(G3 G4) / (|G1|_F |G2|_F)``: 0 exactly when ``O O^H`` and its new counterpart are proportional.

    It is 1 - cos of the angle between ``f = sum_i |c_i|^2 k(a_i, .)`` and g, likewise of the new system, where
    ``k(x, y) = |1 - conj(x) y|^-2``. The sine comes from the residual ``g - t f``, ``t = <f, g> / <f, f>``.
    """
    change = _sum_if_scalar(old, real((new.c - old.c) * (new.c + old.c).conj()))  # q - p
    a, b, p, q, change = states_first(old.a, new.a, _weight(old), _weight(new), change)
    shift = b - a
    aa, ab, bb = szego(a, a), szego(a, b), szego(b, b)
    ba = dagger(ab)
    near = (ba * bb).conj()
    ff, gg = _nonzero(form(p, abs2(aa), p)), _nonzero(form(q, abs2(bb), q))
    # <f, g - f>; every difference of kernels is written as a product with the shift of the poles.
    extra = form(p, abs2(ab), change) + form(p * a.conj(), (aa * ab).conj() * (ab + aa), p * shift.conj())
    excess = extra / ff  # t - 1
    change, base = change - excess * p, (1 + excess) * p
    pull, turn, size = base * shift, base * shift * b.conj(), base * abs2(shift)
    slope = _mixed_slope(a, b, ab * ba * bb)
    residual = form(change, abs2(bb), change)
    residual = residual + 2 * form(change * b.conj(), near * (bb + ba), pull.conj())
    # The difference of k in both arguments.
    residual = residual + 2 * form(turn, near * (ab * bb), turn.conj()) + 2 * form(pull, aa.conj() * slope, pull)
    residual = residual - form(size, abs2(slope), size)
    return residual.clamp_min(0) / (gg + (ff + extra) * (gg / ff).sqrt())


@register_distance("output")
@fused("output")
@per_token
def output(old: StateSpace, new: StateSpace) -> Tensor:
    """Energy of the difference of the two impulse responses over all time, ``sum_t |c a^t b - c' a'^t b'|^2``."""
    if old.b is None or new.b is None:
        which = "old" if old.b is None else "new"
        raise ConfigError(
            f"distance: kind 'output' needs b, and {which}.b is None; give StateSpace(a, c, b), or use kind 'aligned'"
        )
    r = _sum_if_scalar(old, old.c * old.b)
    change = _sum_if_scalar(old, (new.c - old.c) * new.b + old.c * (new.b - old.b))
    a, b, r, change = states_first(old.a, new.a, r, change)
    ab, bb = szego(a, b), szego(b, b)
    moved, near = (b - a) * r, bb * dagger(ab)
    energy = form(change, bb, change) + 2 * form(b * change, near, moved)
    return (energy + form(moved, _mixed_slope(a, b, near * ab), moved)).clamp_min(0)


def _mixed_slope(a: Tensor, b: Tensor, ab_ba_bb: Tensor) -> Tensor:
    """``(bb - ab - ba + aa) / (conj(b_i - a_i) (b_j - a_j))`` of Szego kernels, ``[n, n, ...]``."""
    return (1 - outer(a * b, a * b)) * szego(a, a) * ab_ba_bb


def _weight(space: StateSpace) -> Tensor:
    """``|c|^2``."""
    return _sum_if_scalar(space, abs2(space.c))


def _mass(space: StateSpace) -> Tensor:
    """Diagonal of the self-Gram, ``|c|^2 / (1 - |a|^2)``."""
    return _weight(space) / (1 - abs2(space.a))


def _sum_if_scalar(space: StateSpace, x: Tensor) -> Tensor:
    """Sum over the states when they share one pole: the system has order 1."""
    return x.sum(-1, keepdim=True) if space.is_scalar else x


def _nonzero(x: Tensor) -> Tensor:
    """1 in place of 0: a system whose c is all zero has nothing to compare, and its distance is 0, not NaN."""
    return torch.where(x == 0, torch.ones_like(x), x)
