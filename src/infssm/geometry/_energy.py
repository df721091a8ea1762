"""Distances that see C (and B): `simplified`, `aligned` and `output`.

All three are quadratic forms of ``1 / (1 - a_i b_j)``. They are written through differences of the two systems, so that
no digits cancel near equality: value and gradient of `aligned` and `output` are exactly 0 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.geometry._chunks import per_token
from infssm.geometry._gram import szego
from infssm.geometry._registry import register_distance
from infssm.geometry._space import StateSpace


@register_distance("simplified")
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
    a, b = old.a, new.a
    p, q = _mass(old), _mass(new)
    gap = _abs2((a.unsqueeze(-1) - b.unsqueeze(-2)) * szego(a, b))
    return _form(p, gap, q) / _nonzero(p.sum(-1) * q.sum(-1))


@register_distance("aligned")
@per_token
def aligned(old: StateSpace, new: StateSpace) -> Tensor:
    """``1 - tr(G3 G4) / (|G1|_F |G2|_F)``: 0 exactly when ``O O^H`` and its new counterpart are proportional.

    It is 1 - cos of the angle between ``f = sum_i |c_i|^2 k(a_i, .)`` and g, likewise of the new system, where
    ``k(x, y) = |1 - conj(x) y|^-2``. The sine comes from the residual ``g - t f``, ``t = <f, g> / <f, f>``.
    """
    a, b = old.a, new.a
    p, q = _weight(old), _weight(new)
    change = _sum_if_scalar(old, _real((new.c - old.c) * (new.c + old.c).conj()))  # q - p
    aa, ab, bb = szego(a, a), szego(a, b), szego(b, b)
    ba = ab.mH
    shift = b - a
    col_a = a.conj().unsqueeze(-1) * shift.unsqueeze(-2) * aa * ab  # ab - aa
    col_b = b.conj().unsqueeze(-1) * shift.unsqueeze(-2) * ba * bb  # bb - ba
    both = shift.conj().unsqueeze(-1) * shift.unsqueeze(-2) * _mixed_slope(a, b, ab * ba * bb)
    # Differences of k in the new argument, and in both.
    moved_a, moved_b = _real(col_a.conj() * (ab + aa)), _real(col_b.conj() * (bb + ba))
    curved = 2 * _real(col_b.conj() * col_b.mH) + 2 * _real(aa.conj() * both) - _abs2(both)
    ff, gg = _nonzero(_form(p, _abs2(aa), p)), _nonzero(_form(q, _abs2(bb), q))
    extra = _form(p, _abs2(ab), change) + _form(p, moved_a, p)  # <f, g - f>
    excess = (extra / ff).unsqueeze(-1)  # t - 1
    change, base = change - excess * p, (1 + excess) * p
    residual = _form(change, _abs2(bb), change) + 2 * _form(change, moved_b, base) + _form(base, curved, base)
    return residual.clamp_min(0) / (gg + (ff + extra) * (gg / ff).sqrt())


@register_distance("output")
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
    a, b = old.a, new.a
    ab, bb = szego(a, b), szego(b, b)
    moved, near = (b - a) * r, bb * ab.mH
    energy = _form(change, bb, change) + 2 * _form(b * change, near, moved)
    return (energy + _form(moved, _mixed_slope(a, b, near * ab), moved)).clamp_min(0)


def _mixed_slope(a: Tensor, b: Tensor, ab_ba_bb: Tensor) -> Tensor:
    """``(bb - ab - ba + aa) / (conj(b_i - a_i) (b_j - a_j))`` of Szego kernels, ``[..., n, n]``."""
    both = a * b
    return (1 - both.conj().unsqueeze(-1) * both.unsqueeze(-2)) * szego(a, a) * ab_ba_bb


def _form(x: Tensor, kernel: Tensor, y: Tensor) -> Tensor:
    """Real part of ``x^H kernel y``: ``[...]``."""
    return _real((x.conj() * (kernel @ y.unsqueeze(-1)).squeeze(-1)).sum(-1))


def _weight(space: StateSpace) -> Tensor:
    """``|c|^2``."""
    return _sum_if_scalar(space, _abs2(space.c))


def _mass(space: StateSpace) -> Tensor:
    """Diagonal of the self-Gram, ``|c|^2 / (1 - |a|^2)``."""
    return _weight(space) / (1 - _abs2(space.a))


def _sum_if_scalar(space: StateSpace, x: Tensor) -> Tensor:
    """Sum over the states when they share one pole: the system has order 1."""
    return x.sum(-1, keepdim=True) if space.is_scalar else x


def _nonzero(x: Tensor) -> Tensor:
    """1 in place of 0: a system whose c is all zero has nothing to compare, and its distance is 0, not NaN."""
    return torch.where(x == 0, torch.ones_like(x), x)


def _abs2(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def _real(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x
