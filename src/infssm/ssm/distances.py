"""`distance`: one entry to every kind; `principal_angles`."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from infssm import ops as kernels
from infssm.ops import KINDS
from infssm.ssm.registry import get_distance
from infssm.ssm.space import StateSpace
from infssm.ssm.validate import check_pair


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
    see a alone compare subspaces: order, scale and coordinates of the states do not matter. `simplified` and `aligned`
    do not see the scale of c, however large or small; where c is all zero on one side they are 0. A scalar transition
    (``a [..., 1]``) has observability of rank 1, so these use n = 1, and the others sum ``|c|^2`` or ``c b``.
    Tensors of different precision are widened to the widest of them, and at least to float32.

    Args:
        old: ``a, c, b [..., n]``.
        new: ``a, c, b [..., n]``; leading dimensions broadcast against old's.
        kind: one of `list_distances`.
        soft_normalize: apply soft-normalisation to raw real states first. Poles are compared as they were given, so
            that raw ones up to 80 keep their precision, though tanh(x / 2) rounds to 1 beyond 17 in float32.
        validate: check shapes, types, NaN and poles, with errors that name the argument. Reads values, hence
            synchronises with the device; training passes False, and a pole outside the unit disc gives NaN.
        options: options of the kind, such as ``equality="token" | "tensor" | "off"`` of `simplified`.

    Returns:
        ``[...]``.
    """
    fn = get_distance(kind)
    if validate:
        check_pair(old, new, soft_normalize=soft_normalize)
    old, new = _broadcast(*_same_precision(old, new))
    if soft_normalize and kind in KINDS:
        return fn(old, new, soft_normalize=True, **options)
    if soft_normalize:
        old, new = old.soft_normalized(), new.soft_normalized()
    return fn(old, new, **options)


def principal_angles(old: StateSpace, new: StateSpace) -> Tensor:
    """Principal angles between the two observability subspaces, largest first.

    Small angles come from their sines and large ones from their cosines, so all keep their precision. A scalar
    transition ``a I`` has observability of rank 1, hence one angle.

    Args:
        old: ``a [..., n]``.
        new: ``a [..., n]``.

    Returns:
        ``[..., n]`` in [0, pi/2].
    """
    check_pair(old, new)
    old, new = _broadcast(*_same_precision(old, new))
    return kernels.principal_angles(old.a, new.a)


def _same_precision(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    dtypes = {x.dtype for space in (old, new) for x in (space.a, space.c, space.b) if x is not None}
    if dtypes == {torch.float32}:
        return old, new
    widest = reduce(torch.promote_types, dtypes, torch.float32)
    return old.map(lambda x: x.to(widest)), new.map(lambda x: x.to(widest))


def _broadcast(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    if old.c.shape == new.c.shape:
        return old, new
    lead = torch.broadcast_shapes(old.c.shape[:-1], new.c.shape[:-1])  # type: ignore[no-untyped-call]
    old, new = (space.map(lambda x: x.expand(*lead, x.shape[-1])) for space in (old, new))
    return old, new
