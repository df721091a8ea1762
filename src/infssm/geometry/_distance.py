"""`distance`: one entry to every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.geometry._fused import takes_raw
from infssm.geometry._registry import get_distance
from infssm.geometry._space import StateSpace
from infssm.geometry._validate import check_pair

_NARROW = frozenset({torch.float16, torch.bfloat16})


def distance(
    old: StateSpace,
    new: StateSpace,
    *,
    kind: str = "simplified",
    soft_normalize: bool = False,
    validate: bool = True,
    **options: Any,
) -> Tensor:
    """Squared distance between two systems, one value per leading index.

    | kind | value | sees |
    |---|---|---|
    | `simplified` | ``1 - tr(G3 G4) / (tr G1 tr G2)``, the paper's; not 0 at equality but for its special case | a, c |
    | `aligned` | ``1 - tr(G3 G4) / (|G1|_F |G2|_F)`` | a, c |
    | `martin` | ``-log prod cos^2 theta_i`` | a |
    | `fubini-study` | ``arccos(prod cos theta_i)^2`` | a |
    | `binet-cauchy` | ``1 - prod cos^2 theta_i`` | a |
    | `chordal` | ``2 sum sin^2 theta_i`` | a |
    | `geodesic` | ``sum theta_i^2`` | a |
    | `output` | ``sum_t |c a^t b - c' a'^t b'|^2`` | a, c, b |

    Differentiable in every tensor; all kinds but `simplified` have value 0 and gradient 0 at equality. The kinds that
    see a alone compare subspaces: order, scale and coordinates of the states do not matter. A scalar transition
    (``a [..., 1]``) has observability of rank 1, so these use n = 1, and the others sum ``|c|^2`` or ``c b``.
    float16 and bfloat16 states are widened to float32.

    Args:
        old: ``a, c, b [..., n]``.
        new: ``a, c, b [..., n]``; leading dimensions broadcast against old's.
        kind: one of `list_distances`.
        soft_normalize: apply soft-normalisation to raw real states first.
        validate: check shapes, types, NaN and poles, with errors that name the argument. Reads values, hence
            synchronises with the device; training passes False.
        options: options of the kind, such as ``equality="token" | "tensor" | "off"`` of `simplified`.

    Returns:
        ``[...]``.
    """
    fn = get_distance(kind)
    if validate:
        check_pair(old, new, soft_normalize=soft_normalize)
    old, new = old.map(_widen), new.map(_widen)
    old, new = _broadcast(old, new)
    if soft_normalize and takes_raw(fn):
        return fn(old, new, soft_normalize=True, **options)
    if soft_normalize:
        old, new = old.soft_normalized(), new.soft_normalized()
    return fn(old, new, **options)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _NARROW else x


def _broadcast(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    if old.c.shape == new.c.shape:
        return old, new
    lead = torch.broadcast_shapes(old.c.shape[:-1], new.c.shape[:-1])  # type: ignore[no-untyped-call]
    old, new = (space.map(lambda x: x.expand(*lead, x.shape[-1])) for space in (old, new))
    return old, new
