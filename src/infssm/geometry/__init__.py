"""Geometry of observability subspaces: state spaces, Gram matrices, distances, principal angles."""

from infssm.geometry._distance import distance, principal_angles
from infssm.geometry._gram import gram, gram_dense
from infssm.geometry._registry import describe_distance, list_distances, register_distance
from infssm.geometry._space import StateSpace, soft_normalize

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
