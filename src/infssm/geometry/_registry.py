"""The registry of distance kinds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from infssm._registry import Registry

DistanceFn = Callable[..., Tensor]

_DISTANCES: Registry[DistanceFn] = Registry("distance", "infssm.distances")


def register_distance(name: str) -> Callable[[DistanceFn], DistanceFn]:
    """Register ``fn(old: StateSpace, new: StateSpace, **options) -> [...]`` as a kind of `distance`."""
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
