"""Principal angles between the observability subspaces of two sets of poles."""

from __future__ import annotations

from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.checks import compute_dtype, expect_shape
from infssm.ops.distances import Pair, lattice
from infssm.ops.distances.schubert import rectangular_lattice


def rotation_lattice(old_a: Tensor, new_a: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices ``sine, cosine [..., n, n]`` whose singular values are the sines and cosines of the principal angles.

    old_a, new_a: ``[..., n]`` poles inside the unit disc, ordered so that those of equal index are close: only
    precision depends on the order. ``sine sine^H + cosine cosine^H = 1``. Differentiable in both.
    """
    expect_shape("new_a", new_a, old_a.shape)
    if old_a.shape[-1] == 0:
        raise ConfigError("rotation_lattice: the systems have no poles (n = 0); there is nothing to compare")
    dtype = compute_dtype(old_a, new_a)
    sine, cosine = lattice.rotation_lattice(*Pair(old_a, old_a, new_a, new_a).poles())
    return sine.to(dtype), cosine.to(dtype)


def principal_angles(old_a: Tensor, new_a: Tensor) -> Tensor:
    """Angles between the subspaces, largest first: ``[..., n], [..., m] -> [..., min(n, m)]``, poles in any order.

    Small ones come from their sines and large ones from their cosines, so all keep their precision.
    """
    if old_a.shape[-1] != new_a.shape[-1]:
        return lattice.angles(*rectangular_lattice(old_a, new_a)).to(compute_dtype(old_a, new_a).to_real())
    pair = Pair(old_a, old_a, new_a, new_a).sorted()
    return lattice.angles(*rotation_lattice(pair.old_a, pair.new_a))
