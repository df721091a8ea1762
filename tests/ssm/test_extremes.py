"""What is far from ordinary: no states, mixed precision, huge and silent rows, poles next to the unit circle."""

import math

import mpmath as mp
import pytest
import torch

from infssm import ops as kernels
from infssm.errors import ConfigError
from infssm.ops.backend import NATIVE
from infssm.ssm import StateSpace, distance, list_distances, principal_angles
from tests.ssm.reference import exact_distance

KINDS = list_distances()
SUBSPACE = ["binet-cauchy", "chordal", "fubini-study", "geodesic", "martin"]
SEES_C = ["aligned", "simplified"]
FLOAT32 = 2e-5  # some hundred roundings of 6e-8
VARIANTS = ["float64", "reference", *(NATIVE.isas() if NATIVE is not None else [])]


@pytest.fixture(params=VARIANTS)
def dtype(request, monkeypatch):
    """float64, and float32 by the formula and by every instruction set of this machine."""
    if request.param == "float64":
        yield torch.float64
    elif request.param == "reference":
        monkeypatch.setattr("infssm.ops.backend.NATIVE", None)
        yield torch.float32
    else:
        before = NATIVE.isa()
        NATIVE.use_isa(request.param)
        yield torch.float32
        NATIVE.use_isa(before)


def system(seed, n=6, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    a, c, b = torch.rand(3, n, generator=generator)
    return StateSpace(1.6 * a - 0.8, scale * (2 * c - 1), 2 * b - 1)


def tolerance(dtype):
    return FLOAT32 if dtype == torch.float32 else 1e-11


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_states_are_refused_in_words(kind, lead, dtype):
    empty = StateSpace(*torch.zeros(3, *lead, 0, dtype=dtype))
    with pytest.raises(ConfigError, match=r"old.c .* has no states \(n = 0\)"):
        distance(empty, empty, kind=kind)
    with pytest.raises(ConfigError, match=r"no states \(n = 0\)"):
        distance(empty, empty, kind=kind, validate=False)
    with pytest.raises(ConfigError, match=r"has no states \(n = 0\)"):
        principal_angles(empty, empty)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("soft_normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_is_computed_in_the_widest(kind, soft_normalize, validate):
    old, new = system(0), system(1)
    options = {"kind": kind, "soft_normalize": soft_normalize, "validate": validate}
    expected = distance(old.map(torch.Tensor.double), new.map(torch.Tensor.double), **options)
    leaf = old.a.clone().requires_grad_()
    value = distance(StateSpace(leaf, old.c.double(), old.b), new, **options)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(distance(old, new.map(torch.Tensor.double), **options), expected, rtol=1e-12, atol=0)
    value.backward()
    assert leaf.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "scales", [(1, 1e9), (1e9, 1), (1, 1e-9), (1e-9, 1), (1e30, 1e30), (1e-15, 1e-15), (1e30, 1e-9)]
)
@pytest.mark.parametrize("kind", SEES_C)
def test_the_scale_of_c_does_not_matter(kind, scales, dtype):
    old, new = system(0).map(lambda x: x.to(dtype)), system(1).map(lambda x: x.to(dtype))
    exact = float(exact_distance(old.map(torch.Tensor.double), new.map(torch.Tensor.double), kind))
    leaves = [(scale * space.c).requires_grad_() for scale, space in zip(scales, (old, new), strict=True)]
    value = distance(StateSpace(old.a, leaves[0]), StateSpace(new.a, leaves[1]), kind=kind)
    assert value.item() == pytest.approx(exact, rel=tolerance(dtype))
    plain = [space.c.clone().requires_grad_() for space in (old, new)]
    slopes = torch.autograd.grad(distance(*map(StateSpace, (old.a, new.a), plain), kind=kind), plain)
    for slope, expected, scale in zip(torch.autograd.grad(value, leaves), slopes, scales, strict=True):
        assert (slope.double() * scale - expected).norm() <= 10 * tolerance(dtype) * expected.norm()


@pytest.mark.parametrize("silent", ["old", "new", "both"])
@pytest.mark.parametrize("kind", SEES_C)
def test_nothing_is_compared_where_a_side_is_silent(kind, silent, dtype):
    old, new = (
        StateSpace(x.a, torch.zeros_like(x.c) if silent in (name, "both") else x.c).map(
            lambda t: t.to(dtype).requires_grad_()
        )
        for name, x in (("old", system(0)), ("new", system(1)))
    )
    value = distance(old, new, kind=kind)
    assert value.item() == 0
    for slope in torch.autograd.grad(value, (old.a, old.c, new.a, new.c)):
        assert not slope.any()


def test_an_energy_beyond_float32_is_infinite_and_not_nan():
    old, new = system(0), system(1, scale=1e30)
    assert distance(old, new, kind="output").item() == math.inf
    wide = distance(old.map(torch.Tensor.double), new.map(torch.Tensor.double), kind="output").item()
    assert wide == pytest.approx(float(exact_distance(*(x.map(torch.Tensor.double) for x in (old, new)), "output")))


def of_tangent(kind, cosine2):
    """A squared distance of two subspaces of dimension 1 from cos^2 of their angle."""
    if kind in ("simplified", "aligned", "binet-cauchy"):
        return 1 - cosine2
    if kind == "chordal":
        return 2 - 2 * cosine2
    return -mp.log(cosine2) if kind == "martin" else mp.acos(mp.sqrt(cosine2)) ** 2


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-6, 2.0**-24])
@pytest.mark.parametrize("kind", [*SUBSPACE, *SEES_C])
def test_opposite_poles_next_to_the_circle(kind, gap, dtype):
    """Values and gradients by the poles, whose exact values come from cos^2 = (1 - a^2) (1 - b^2) / (1 - a b)^2."""
    poles = [torch.tensor([sign * (1 - gap)]).to(dtype).requires_grad_() for sign in (-1, 1)]
    value = distance(*(StateSpace(a, torch.ones_like(a)) for a in poles), kind=kind)
    slopes = torch.autograd.grad(value, poles)
    with mp.workdps(60):
        a, b = (mp.mpf(x.item()) for x in poles)

        def exact(a, b):
            return of_tangent(kind, (1 - a * a) * (1 - b * b) / (1 - a * b) ** 2)

        assert value.item() == pytest.approx(float(exact(a, b)), rel=FLOAT32)
        for slope, direction in zip(slopes, ((1, 0), (0, 1)), strict=True):
            assert slope.item() == pytest.approx(float(mp.diff(exact, (a, b), direction)), rel=2e-3)


@pytest.mark.parametrize("kind", ["chordal", "geodesic", "martin"])
def test_several_opposite_poles_next_to_the_circle(kind, dtype):
    edge = torch.tensor([0.9999, 0.99999, 0.9, 1 - 2.0**-22])
    wide = [x.double().requires_grad_() for x in (edge, -edge.flip(0))]
    exact = distance(*(StateSpace(a, torch.ones_like(a)) for a in wide), kind=kind)
    leaves = [x.detach().to(dtype).requires_grad_() for x in wide]
    value = distance(*(StateSpace(a, torch.ones_like(a)) for a in leaves), kind=kind)
    assert value.item() == pytest.approx(exact.item(), rel=FLOAT32)
    for slope, expected in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(exact, wide), strict=True):
        assert (slope - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("top", [15.0, 17.0, 20.0, 25.0, 30.0, 60.0, -20.0])
@pytest.mark.parametrize("kind", KINDS)
def test_raw_poles_that_round_to_one(kind, top, dtype):
    """tanh(x / 2) is 1 in float32 from x = 17.4 on and in float64 from 38 on; the distance still knows x."""
    c = torch.tensor([0.3, 0.4, -0.8])
    old = StateSpace(torch.tensor([top, 1.0, 0.3]), c, c)
    new = StateSpace(torch.tensor([top - 2, 0.8, 0.1]), 1.1 * c, 0.8 * c)
    with mp.workdps(100):
        exact = float(exact_raw(old, new, kind))
    leaf = new.a.to(dtype).requires_grad_()
    past, now = old.map(lambda x: x.to(dtype)), new.map(lambda x: x.to(dtype))
    value = distance(past, StateSpace(leaf, now.c, now.b), kind=kind, soft_normalize=True, validate=False)
    assert value.item() == pytest.approx(exact, rel=FLOAT32)
    (slope,) = torch.autograd.grad(value, leaf)
    step = 1e-4
    with mp.workdps(100):
        sides = [
            exact_raw(old, StateSpace(new.a.double() + torch.tensor([d, 0, 0]), new.c, new.b), kind)
            for d in (step, -step)
        ]
        expected = float((sides[0] - sides[1]) / (2 * step))
    assert slope[0].item() == pytest.approx(expected, rel=1e-3)


def exact_raw(old, new, kind):
    """The distance of soft-normalised states, which do not fit a float, in arithmetic of many digits."""

    class Exact(StateSpace):
        """A system whose tensors are lists of mpmath numbers."""

        n = 3

    def values(x):
        return _Numbers(mp.tanh(mp.mpf(v) / 2) for v in x.tolist())

    return exact_distance(*(Exact(values(x.a), values(x.c), values(x.b)) for x in (old, new)), kind)


class _Numbers(list):
    """What the reference asks of a tensor."""

    def tolist(self):
        return list(self)

    def is_complex(self):
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_poles_out_of_reach_are_nan_and_not_a_number_that_looks_right(kind, dtype):
    raw = StateSpace(torch.tensor([[0.5, 1.0], [0.5, 1.0]]), torch.ones(2, 2), torch.ones(2, 2)).map(
        lambda x: x.to(dtype)
    )
    far = StateSpace(torch.tensor([[0.4, 1.0], [0.4, 100.0]], dtype=dtype), 0.5 * raw.c, raw.b)
    value = distance(raw, far, kind=kind, soft_normalize=True, validate=False)
    assert value.isnan().tolist() == [False, True]
    for outside in (1.0, -1.0, 1.5, math.nan):
        new = StateSpace(torch.tensor([[0.4, 0.3], [0.4, outside]], dtype=dtype), 0.5 * raw.c, raw.b)
        old = StateSpace(raw.a / 2, raw.c, raw.b)
        assert distance(old, new, kind=kind, validate=False).isnan().tolist() == [False, True]


def test_the_lattice_without_poles_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"no poles \(n = 0\)"):
        kernels.rotation_lattice(torch.zeros(3, 0), torch.zeros(3, 0))
