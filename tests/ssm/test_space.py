"""`StateSpace`, soft-normalisation, conjugate halves and dense systems."""

import dataclasses

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ssm import StateSpace, distance, soft_normalize
from tests.ssm.reference import random_system


def test_soft_normalisation_is_twice_the_sigmoid_minus_one():
    x = torch.linspace(-20, 20, 101, dtype=torch.float64)
    torch.testing.assert_close(soft_normalize(x), 2 * torch.sigmoid(x) - 1)
    assert soft_normalize(torch.tensor(1.0)) == pytest.approx(0.46211716)
    with pytest.raises(ConfigError, match="x is complex"):
        soft_normalize(x + 0j)


def test_state_space_is_a_frozen_record():
    space = random_system(3, torch.Generator().manual_seed(0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        space.a = space.c
    doubled = StateSpace(space.a, space.c).map(lambda x: 2 * x)
    assert doubled.b is None
    torch.testing.assert_close(doubled.c, 2 * space.c)
    leaf = space.map(lambda x: x.requires_grad_())
    assert not any(x.requires_grad for x in (leaf.detach().a, leaf.detach().c, leaf.detach().b))
    torch.testing.assert_close(leaf.soft_normalized().b, soft_normalize(space.b))


def test_complex_states_are_not_soft_normalised():
    space = random_system(3, torch.Generator().manual_seed(0), is_complex=True)
    torch.testing.assert_close(space.soft_normalized().a, space.a)


def test_conjugate_half_counts_its_mirror():
    """An S4D layer stores half of its pairs; with the mirror the response is 2 Re(c a^t b)."""
    generator = torch.Generator().manual_seed(0)
    old, new = (random_system(3, generator, is_complex=True) for _ in range(2))
    powers = torch.arange(800)[:, None]
    responses = [2 * (x.c * x.b * x.a**powers).sum(-1).real for x in (old, new)]
    value = distance(old.with_conjugates(), new.with_conjugates(), kind="output")
    torch.testing.assert_close(value, (responses[0] - responses[1]).square().sum())
    real = random_system(3, generator)
    with pytest.raises(ConfigError, match="a is real"):
        real.with_conjugates()
    with pytest.raises(ConfigError, match="scalar transition"):
        StateSpace(old.a[:1], old.c).with_conjugates()


def dense(seed, *lead, n=4, radius=0.9):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(*lead, n, n, generator=generator, dtype=torch.float64)
    A = radius * A / torch.linalg.eigvals(A).abs().amax(-1)[..., None, None]
    return A, *torch.randn(2, *lead, n, generator=generator, dtype=torch.float64)


def test_dense_system_has_the_same_response():
    A, C, B = dense(0)
    space = StateSpace.from_dense(A, C[None], B[:, None])
    for t in range(6):
        expected = C @ torch.linalg.matrix_power(A, t) @ B
        torch.testing.assert_close((space.c * space.a**t * space.b).sum(), expected + 0j)


def test_dense_systems_batch():
    A, C, B = dense(1, 2, 3)
    whole = StateSpace.from_dense(A, C, B)
    one = StateSpace.from_dense(A[1, 2], C[1, 2], B[1, 2])
    torch.testing.assert_close(whole.a[1, 2], one.a)
    torch.testing.assert_close((whole.c * whole.b)[1, 2], one.c * one.b)


def test_distance_of_dense_systems_is_the_energy_and_the_subspace_angle():
    x, y = dense(2), dense(3)
    old, new = StateSpace.from_dense(*x), StateSpace.from_dense(*y)

    def observability(A, C, steps=400):
        rows = [C]
        for _ in range(steps):
            rows.append(rows[-1] @ A)
        return torch.stack(rows)

    energy = (observability(*x[:2]) @ x[2] - observability(*y[:2]) @ y[2]).square().sum()
    torch.testing.assert_close(distance(old, new, kind="output"), energy)
    bases = [torch.linalg.qr(observability(*s[:2])).Q for s in (x, y)]
    cosines = torch.linalg.svdvals(bases[0].mT @ bases[1])
    torch.testing.assert_close(distance(old, new, kind="geodesic"), cosines.clamp(max=1).arccos().square().sum())
    torch.testing.assert_close(distance(old, new, kind="chordal"), 8 - 2 * cosines.square().sum())
    torch.testing.assert_close(distance(old, new, kind="martin"), -2 * cosines.log().sum())


def test_nearby_dense_systems_pair_their_poles():
    A, C, B = dense(4)
    step = 1e-7 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, new = StateSpace.from_dense(A, C, B), StateSpace.from_dense(A + step, C, B)
    assert (old.a - new.a).abs().max() < 1e-5


def test_dense_errors():
    A, C, B = dense(0)
    with pytest.raises(ConfigError, match=r"A is unstable, spectral radius 1\.8 >= 1"):
        StateSpace.from_dense(2 * A, C)
    with pytest.raises(ConfigError, match=r"A holds a NaN or infinite value"):
        StateSpace.from_dense(A * torch.nan, C)
    with pytest.raises(ConfigError, match=r"A must be square"):
        StateSpace.from_dense(A[:2], C)
    with pytest.raises(ConfigError, match=r"C must be one row of n = 4 values"):
        StateSpace.from_dense(A, C[:3])
    with pytest.raises(ConfigError, match=r"B must be one row of n = 4 values"):
        StateSpace.from_dense(A, C, B[:3])
