"""Principal angles between the observability subspaces of two sets of poles."""

from __future__ import annotations

from torch import Tensor

from infssm.kernels import _lattice, _ops
from infssm.kernels._checks import expect_shape
from infssm.kernels.backend import single, use_native


def rotation_lattice(old_a: Tensor, new_a: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Matrices ``sine, cosine [..., n, n]`` whose singular values are the sines and cosines of the principal angles.

    old_a, new_a: ``[..., n]`` poles inside the unit disc, ordered so that those of equal index are close: only
    precision depends on the order. ``sine sine^H + cosine cosine^H = 1``. Differentiable in both; complex poles are
    served by the reference.
    """
    expect_shape("new_a", new_a, old_a.shape)
    if use_native(backend, old_a, new_a):
        sine, cosine = _ops.lattice(single(old_a), single(new_a))
        return sine, cosine
    return _lattice.rotation_lattice(old_a, new_a)


def principal_angles(old_a: Tensor, new_a: Tensor, *, backend: str | None = None) -> Tensor:
    """Angles ``[..., n]`` between the subspaces, largest first; arguments as of `rotation_lattice`.

    Small ones come from their sines and large ones from their cosines, so all keep their precision.
    """
    return _lattice.angles(*rotation_lattice(old_a, new_a, backend=backend))
