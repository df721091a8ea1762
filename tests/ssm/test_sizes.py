"""Distances between systems of different sizes, against QR of many rows and arithmetic of many digits."""

import math

import mpmath as mp
import pytest
import torch

from infssm.errors import ConfigError
from infssm.ssm import StateSpace, distance, principal_angles
from tests.ssm.reference import cross_gram, frobenius2, inner_product_matrix, random_system, to_mp, trace

SIZES = [(3, 5), (5, 3), (1, 4), (2, 9)]


def pair(n, m, *, is_complex=False, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (random_system(k, g, radius=0.9, is_complex=is_complex, dtype=dtype) for k in (n, m))


def sines_by_qr(old: StateSpace, new: StateSpace) -> torch.Tensor:
    """Sines of the principal angles from orthonormal bases of 600 rows, smallest angle last."""
    powers = torch.arange(600, dtype=torch.float64).unsqueeze(-1)
    small, large = sorted((old.a, new.a), key=len)
    p, q = (torch.linalg.qr(a.to(torch.complex128) ** powers)[0] for a in (small, large))
    return torch.linalg.svdvals(p - q @ (q.mH @ p))


def exact(old: StateSpace, new: StateSpace, kind: str):
    """The definition, by Gram matrices in 200 digits."""
    with mp.workdps(200):
        a, c, b, d = to_mp(old.a), to_mp(old.c), to_mp(new.a), to_mp(new.c)
        if kind == "output":
            r = [x * y for x, y in zip(c, to_mp(old.b), strict=True)]
            s = [-x * y for x, y in zip(d, to_mp(new.b), strict=True)]
            return mp.re(mp.fsum(cross_gram(a + b, r + s, a + b, r + s)))
        if kind in ("simplified", "aligned"):
            own, other, both = cross_gram(a, c, a, c), cross_gram(b, d, b, d), cross_gram(a, c, b, d)
            if kind == "simplified":
                return 1 - frobenius2(both) / (trace(own) * trace(other))
            return 1 - frobenius2(both) / mp.sqrt(frobenius2(own) * frobenius2(other))
        a, b = sorted((a, b), key=len)
        product = inner_product_matrix(a, b)
        product = product * product.H
        squares = [min(mp.mpf(1), mp.re(x)) for x in mp.eighe(product, eigvals_only=True)]
        martin = -mp.fsum(mp.log(x) for x in squares)
        return {
            "chordal": lambda: 2 * mp.fsum(1 - x for x in squares),
            "geodesic": lambda: mp.fsum(mp.acos(mp.sqrt(x)) ** 2 for x in squares),
            "martin": lambda: martin,
            "binet-cauchy": lambda: 1 - mp.exp(-martin),
            "fubini-study": lambda: mp.acos(mp.exp(-martin / 2)) ** 2,
        }[kind]()


KINDS = ["chordal", "geodesic", "martin", "binet-cauchy", "fubini-study", "output", "aligned", "simplified"]


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_the_definition(kind, is_complex):
    for n, m in SIZES:
        old, new = pair(n, m, is_complex=is_complex)
        value, wanted = distance(old, new, kind=kind).item(), float(exact(old, new, kind))
        assert value == pytest.approx(wanted, rel=1e-9, abs=1e-13), (n, m)
        assert value == pytest.approx(distance(new, old, kind=kind).item(), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_angles_equal_those_of_orthonormal_bases(n, m):
    for is_complex in (False, True):
        old, new = pair(n, m, is_complex=is_complex)
        angles, sines = principal_angles(old, new), sines_by_qr(old, new)
        assert len(angles) == min(n, m)
        torch.testing.assert_close(angles.sin(), sines, rtol=1e-8, atol=1e-11)
        missing = abs(n - m)
        chordal = distance(old, new, kind="chordal", count_missing=True)
        torch.testing.assert_close(chordal, 2 * sines.square().sum() + 2 * missing, rtol=1e-9, atol=1e-12)
        geodesic = distance(old, new, kind="geodesic", count_missing=True)
        plain = distance(old, new, kind="geodesic")
        torch.testing.assert_close(geodesic, plain + missing * math.pi**2 / 4)


@pytest.mark.parametrize("soft", [False, True])
def test_a_system_inside_a_larger_one_has_distance_zero(soft):
    large = next(iter(pair(6, 6)))
    small = large.map(lambda x: x[..., [4, 1, 3]])
    for kind in ("chordal", "geodesic", "martin", "binet-cauchy", "fubini-study"):
        leaf = small.a.clone().requires_grad_()
        value = distance(StateSpace(leaf, small.c), large, kind=kind, soft_normalize=soft)
        assert abs(value.item()) < 1e-25
        (slope,) = torch.autograd.grad(value, leaf)
        assert slope.abs().max() < 1e-12
    silent = StateSpace(large.a, large.c, large.b * torch.tensor([0, 1, 0, 1, 1, 0]))
    assert distance(small, silent, kind="output", soft_normalize=soft).item() < 1e-25


def test_sizes_agree_where_they_are_equal_and_soft_normalisation_is_the_same():
    old, new = pair(4, 4)
    for kind in ("chordal", "geodesic"):  # the option alone takes the rectangular lattice
        expected = distance(old, new, kind=kind)
        torch.testing.assert_close(distance(old, new, kind=kind, count_missing=True), expected)
    raw, other = pair(3, 5, seed=3)
    for kind in KINDS:
        soft = distance(raw, other, kind=kind, soft_normalize=True)
        torch.testing.assert_close(soft, distance(raw.soft_normalized(), other.soft_normalized(), kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_single_precision(kind):
    old, new = pair(2, 4, seed=1)
    leaves = [x.clone().requires_grad_() for s in (old, new) for x in (s.a, s.c, s.b)]

    def value(*x):
        return distance(StateSpace(*x[:3]), StateSpace(*x[3:]), kind=kind, validate=False)

    torch.autograd.gradcheck(value, leaves)
    narrow = distance(old.map(torch.Tensor.float), new.map(torch.Tensor.float), kind=kind)
    torch.testing.assert_close(narrow, distance(old, new, kind=kind).float(), rtol=1e-4, atol=1e-6)


def test_a_scalar_transition_beside_a_diagonal_one():
    """Mamba-2 (one pole, n = 4) against a diagonal system of three states: the same as its four repeated poles."""
    scalar, diagonal = pair(4, 3)
    scalar = StateSpace(scalar.a[:1], scalar.c, scalar.b)
    repeated = StateSpace(scalar.a.expand(4), scalar.c, scalar.b)
    for kind in ("output", "aligned", "simplified"):
        torch.testing.assert_close(distance(scalar, diagonal, kind=kind), distance(repeated, diagonal, kind=kind))
    assert principal_angles(scalar, diagonal).shape == (1,)


def test_real_and_complex_systems_and_broadcasting():
    old, new = pair(3, 5)
    cast = new.map(lambda x: x + 0j)
    for kind in KINDS:
        torch.testing.assert_close(distance(old, cast, kind=kind), distance(old, new, kind=kind))
    stacked = old.map(lambda x: x.expand(2, 1, 3))
    assert distance(stacked, new.map(lambda x: x.expand(4, 5)), kind="chordal").shape == (2, 4)


def test_right_angles_are_counted_for_two_kinds_only():
    old, new = pair(3, 5)
    with pytest.raises(ConfigError, match="count_missing=True needs kind='chordal' or 'geodesic'"):
        distance(old, new, kind="martin", count_missing=True)
