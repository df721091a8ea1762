"""Geometry of observability subspaces: state spaces, Gram matrices, distances, principal angles."""

from infssm.geometry import _energy as _energy
from infssm.geometry._distance import distance
from infssm.geometry._gram import gram, gram_dense
from infssm.geometry._registry import describe_distance, list_distances, register_distance
from infssm.geometry._space import StateSpace, soft_normalize
from infssm.geometry._subspace import principal_angles

__all__ = [
    "StateSpace",
    "describe_distance",
    "distance",
    "gram",
    "gram_dense",
    "list_distances",
    "principal_angles",
    "register_distance",
    "soft_normalize",
]
