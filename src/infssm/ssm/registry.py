"""The registry of distance kinds: those of the kernels' table, and what others register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from infssm import ops as kernels
from infssm._registry import Registry
from infssm.errors import ConfigError
from infssm.ops import KINDS, Kind
from infssm.ssm.space import StateSpace

DistanceFn = Callable[..., Tensor]

_DISTANCES: Registry[DistanceFn] = Registry("distance", "infssm.distances")


def register_distance(name: str) -> Callable[[DistanceFn], DistanceFn]:
    """Register ``fn(old: StateSpace, new: StateSpace, **options) -> [...]`` as a kind of `distance`.

    The systems come with equal leading dimensions, in one precision of at least float32, soft-normalised where asked.
    """
    return _DISTANCES.register(name)


def list_distances() -> list[str]:
    """Names of every registered kind."""
    return list(_DISTANCES)


def describe_distance(name: str) -> str:
    """What a kind measures, in a line."""
    return _DISTANCES.describe(name)


def get_distance(name: str) -> DistanceFn:
    """The function registered under ``name``."""
    return _DISTANCES[name]


def _from_table(row: Kind) -> DistanceFn:
    def evaluate(old: StateSpace, new: StateSpace, *, soft_normalize: bool = False, **options: Any) -> Tensor:
        for side, space in (("old", old), ("new", new)):
            if "b" in row.sees and space.b is None:
                raise ConfigError(
                    f"distance: kind {row.name!r} needs b, and {side}.b is None;"
                    " give StateSpace(a, c, b), or use kind 'aligned'"
                )
        options |= {"kind": row.name, "soft_normalize": soft_normalize}
        return kernels.fused_distance(old.a, old.c, new.a, new.c, old_b=old.b, new_b=new.b, **options)

    evaluate.__doc__ = row.summary
    return evaluate


for _row in KINDS.values():
    register_distance(_row.name)(_from_table(_row))
