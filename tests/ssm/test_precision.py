"""Every distance against its definition in arithmetic of 60 and more digits."""

import mpmath as mp
import pytest
import torch

from infssm.ssm import StateSpace, distance, list_distances, principal_angles
from tests.ssm.reference import angles, digits, exact_distance, perturbed, random_system, relative_error, to_mp

KINDS = list_distances()
SUBSPACE = ["binet-cauchy", "chordal", "fubini-study", "geodesic", "martin"]
FLOAT32_TOLERANCE = 1e-3


def check(old, new, kind, tolerance):
    options = {"equality": "off"} if kind == "simplified" else {}
    assert relative_error(distance(old, new, kind=kind, **options), exact_distance(old, new, kind)) <= tolerance


def vim_states(seed, dtype, n=16):
    """States as a trained Vim has them after soft-normalisation: all poles squeezed into (0.34, 0.456)."""
    generator = torch.Generator().manual_seed(seed)
    a = 0.34 + 0.116 * torch.rand(n, generator=generator, dtype=torch.float64)
    c, b = torch.tanh(torch.randn(2, n, generator=generator, dtype=torch.float64) / 2)
    return StateSpace(a, c, b).map(lambda x: x.to(dtype)), generator


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_random_systems(kind, n, is_complex):
    generator = torch.Generator().manual_seed(n)
    old, new = (random_system(n, generator, is_complex=is_complex) for _ in range(2))
    check(old, new, kind, 1e-9)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_small_perturbations(kind, n, size):
    generator = torch.Generator().manual_seed(n)
    old = random_system(n, generator)
    check(old, perturbed(old, size, generator), kind, 1e-9)


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_small_perturbations_in_float32(kind, n, size):
    generator = torch.Generator().manual_seed(n)
    old = random_system(n, generator, dtype=torch.float32, radius=0.8)
    check(old, perturbed(old, size, generator), kind, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("kind", ["martin", "chordal", "geodesic"])
def test_small_perturbations_of_large_systems_in_float32(kind):
    generator = torch.Generator().manual_seed(32)
    old = random_system(32, generator, dtype=torch.float32, radius=0.8)
    check(old, perturbed(old, 1e-4, generator), kind, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [3e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_vim_states(kind, size, dtype):
    old, generator = vim_states(0, dtype)
    check(old, perturbed(old, size, generator), kind, 1e-9 if dtype == torch.float64 else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", SUBSPACE)
def test_states_in_another_order(kind, dtype):
    old, generator = vim_states(1, dtype)
    new = perturbed(old, 1e-4, generator)
    order = torch.randperm(old.n, generator=generator)
    check(old, new.map(lambda x: x[order]), kind, 1e-9 if dtype == torch.float64 else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("size", [1e-2, 1e-4])
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_and_nearly_repeated_poles(kind, size, gap, dtype):
    old, generator = vim_states(2, dtype, n=8)
    group = torch.arange(8)
    old = StateSpace(old.a[group // 4] + gap * (group % 4), old.c, old.b)
    check(old, perturbed(old, size, generator), kind, 1e-9 if dtype == torch.float64 else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_both_systems_with_repeated_poles(kind):
    old = StateSpace(torch.tensor([0.5, 0.5, 0.5, -0.25]), torch.ones(4), torch.ones(4)).map(torch.Tensor.double)
    new = StateSpace(torch.tensor([0.25, 0.25, 0.5, 0.5]), torch.ones(4), -torch.ones(4)).map(torch.Tensor.double)
    check(old, new, kind, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_slow_poles(kind):
    generator = torch.Generator().manual_seed(3)
    a = torch.exp(-0.001 * torch.arange(1, 17, dtype=torch.float64))
    old = StateSpace(a, *torch.randn(2, 16, generator=generator, dtype=torch.float64))
    check(old, perturbed(old, 1e-5, generator), kind, 1e-9)


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("n", [1, 4, 12])
def test_principal_angles(n, is_complex):
    generator = torch.Generator().manual_seed(n)
    old, new = (random_system(n, generator, is_complex=is_complex) for _ in range(2))
    with mp.workdps(digits(old.a, new.a)):
        exact = torch.tensor([float(t) for t in angles(to_mp(old.a), to_mp(new.a))], dtype=torch.float64)
    torch.testing.assert_close(principal_angles(old, new), exact, rtol=0, atol=1e-12)
    # The largest of them and, for near systems, the small ones too keep relative precision.
    near = StateSpace(old.a + 1e-6, old.c)
    with mp.workdps(digits(old.a, near.a)):
        largest = angles(to_mp(old.a), to_mp(near.a))[0]
    assert relative_error(principal_angles(old, near)[0], largest) < 1e-9


def test_orthogonal_subspaces_reach_a_right_angle():
    # Poles 0 and a: span{e_0} against (1, a, a^2, ...), cos^2 = 1 - a^2; two poles ±a hold the orthogonal pair.
    a = torch.tensor([0.999999999], dtype=torch.float64)
    angle = principal_angles(StateSpace(0 * a, a), StateSpace(a, a))
    torch.testing.assert_close(angle, torch.arccos(((1 - a) * (1 + a)).sqrt()), rtol=1e-10, atol=0)
