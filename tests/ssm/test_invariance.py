"""What each distance must not see: order, scale and coordinates of the states."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from infssm.ssm import StateSpace, distance, list_distances
from tests.ssm.reference import random_system

SUBSPACE = ["binet-cauchy", "chordal", "fubini-study", "geodesic", "martin"]
seeds = st.integers(0, 2**32 - 1)
orders = st.integers(1, 12)
quick = settings(max_examples=15, deadline=None)


def systems(seed, n, is_complex=False):
    generator = torch.Generator().manual_seed(seed)
    old, new = (random_system(n, generator, is_complex=is_complex) for _ in range(2))
    return old, new, generator


@pytest.mark.parametrize("kind", list_distances())
@quick
@given(seed=seeds, n=orders, is_complex=st.booleans())
def test_permutation(kind, seed, n, is_complex):
    old, new, generator = systems(seed, n, is_complex)
    order = torch.randperm(n, generator=generator)
    torch.testing.assert_close(
        distance(old, new.map(lambda x: x[order]), kind=kind), distance(old, new, kind=kind), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", [*SUBSPACE, "output"])
@quick
@given(seed=seeds, n=orders, is_complex=st.booleans())
def test_diagonal_rescaling(kind, seed, n, is_complex):
    old, new, generator = systems(seed, n, is_complex)
    scale = 0.1 + 3 * torch.rand(n, generator=generator, dtype=torch.float64)
    scaled = StateSpace(new.a, new.c / scale, new.b * scale)
    torch.testing.assert_close(distance(old, scaled, kind=kind), distance(old, new, kind=kind), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [*SUBSPACE, "output"])
@quick
@given(seed=seeds, n=st.integers(1, 6))
def test_change_of_coordinates_of_a_dense_system(kind, seed, n):
    old, new, generator = systems(seed, n)
    P = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    P = P * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    dense = StateSpace.from_dense(P @ torch.diag(new.a) @ torch.linalg.inv(P), new.c @ torch.linalg.inv(P), P @ new.b)
    modal = StateSpace.from_dense(torch.diag(old.a), old.c, old.b)
    # Eigenvalues of nearly repeated poles move by roundoff times the condition of their eigenvectors.
    torch.testing.assert_close(distance(modal, dense, kind=kind), distance(old, new, kind=kind), rtol=1e-6, atol=1e-8)


@quick
@given(seed=seeds, n=orders)
def test_symmetry_and_range(seed, n):
    old, new, _ = systems(seed, n)
    for kind in list_distances():
        value = distance(old, new, kind=kind)
        torch.testing.assert_close(distance(new, old, kind=kind), value, rtol=1e-9, atol=1e-12)
        top = {"simplified": 1, "aligned": 1, "binet-cauchy": 1, "chordal": 2 * n}.get(kind, float("inf"))
        assert 0 <= value <= top * (1 + 1e-12)


def test_aligned_sees_c_but_not_its_scale_or_signs():
    old, new, _ = systems(0, 5)
    base = distance(old, new, kind="aligned")
    torch.testing.assert_close(distance(old, StateSpace(new.a, -3 * new.c), kind="aligned"), base)
    signs = torch.tensor([1.0, -1, 1, -1, -1], dtype=torch.float64)
    torch.testing.assert_close(distance(old, StateSpace(new.a, signs * new.c), kind="aligned"), base)
    assert distance(old, StateSpace(old.a, 2 * old.c), kind="aligned") < 1e-30
    assert distance(old, StateSpace(old.a, old.c.flip(0)), kind="aligned") > 1e-3


def test_geodesic_obeys_the_triangle_inequality():
    generator = torch.Generator().manual_seed(0)
    x, y, z = (random_system(4, generator) for _ in range(3))
    xy, yz, xz = (distance(p, q, kind="geodesic").sqrt() for p, q in ((x, y), (y, z), (x, z)))
    assert xz <= xy + yz
