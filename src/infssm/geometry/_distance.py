"""`distance`: one entry to every kind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infssm.geometry._registry import get_distance
from infssm.geometry._space import StateSpace


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

    Args:
        old: ``a, c, b [..., n]``.
        new: ``a, c, b [..., n]``; leading dimensions broadcast against old's.
        kind: one of `list_distances`.
        soft_normalize: apply soft-normalisation to raw real states first.
        validate: check shapes, types, NaN and poles, with errors that name the argument. Reads values, hence
            synchronises with the device; training passes False.
        options: options of the kind, such as ``equality`` of `simplified`.

    Returns:
        ``[...]``.
    """
    fn = get_distance(kind)
    if soft_normalize:
        old, new = old.soft_normalized(), new.soft_normalized()
    return fn(old, new, **options)
