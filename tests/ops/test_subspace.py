"""Lattice of rotations, chordal and geodesic distance: every instruction set against the lattice in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import fused_distance, rotation_lattice
from tests.compare import assert_rounding
from tests.ops.cases import assert_equivalent, assert_near

SIZES = [1, 2, 3, 16, 17, 33, 100]
FLOAT32 = {"values": 1e-5, "gradients": 1e-4}
both_kinds = pytest.mark.parametrize("kind", ["chordal", "geodesic"])


def poles(kind: str, n: int, systems: int = 5) -> dict[str, Tensor]:
    """Sorted old and new poles."""
    g = torch.Generator().manual_seed(n)
    old, noise = torch.tanh(torch.randn(systems, n, generator=g) / 2), torch.randn(systems, n, generator=g)
    new = {
        "near": lambda: old + 1e-4 * noise * (1 - old.square()),
        "apart": lambda: torch.tanh(torch.atanh(old) + 0.05 * noise),
        "far": lambda: torch.tanh(noise / 2),
        "opposite": lambda: -0.5 - 0.2 * old.abs(),
        "equal": lambda: old.clone(),
    }[kind]()
    if kind == "opposite":
        old = 0.5 + 0.2 * old.abs()
    return {"old_a": old.sort(-1).values, "new_a": new.sort(-1).values}


def between(kind: str, old_a: Tensor, new_a: Tensor, **options) -> Tensor:
    """Distance of poles as they are."""
    return fused_distance(old_a, old_a, new_a, new_a, kind=kind, soft_normalize=False, **options)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error over the systems (rows)."""
    difference, size = (x.reshape(len(x), -1).norm(dim=1) for x in (actual.double() - expected, expected))
    return float((difference / size).max())


@pytest.mark.parametrize("kind", ["near", "apart", "far", "opposite"])
@pytest.mark.parametrize("n", SIZES)
def test_lattice(backend: str, n: int, kind: str) -> None:
    assert_equivalent(rotation_lattice, poles(kind, n), backend=backend, **FLOAT32)


@pytest.mark.parametrize("systems", [1, 4, 15, 16, 35])
def test_lattice_of_any_number_of_systems(backend: str, systems: int) -> None:
    assert_equivalent(rotation_lattice, poles("apart", 6, systems), backend=backend, **FLOAT32)
    cube = {name: pole.expand(2, 3, systems, 6) for name, pole in poles("far", 6, systems).items()}
    assert rotation_lattice(**cube, backend=backend)[0].shape == (2, 3, systems, 6, 6)


@both_kinds
@pytest.mark.parametrize("case", ["near", "apart", "far", "opposite"])
@pytest.mark.parametrize("n", SIZES)
def test_distance(backend: str, n: int, case: str, kind: str) -> None:
    """Relative precision of every system by itself, near equality too."""
    single = poles(case, n)
    results = []
    for dtype, chosen in ((torch.float32, backend), (torch.float64, "reference")):
        leaves = [pole.to(dtype).requires_grad_() for pole in single.values()]
        value = between(kind, *leaves, backend=chosen)
        results.append([value.detach(), *torch.autograd.grad(value.sum(), leaves)])
    for name, actual, expected in zip(("value", "old", "new"), *results, strict=True):
        steep = kind == "geodesic" and name != "value"  # towards 90 degrees d theta^2 / d sin^2 has no bound
        assert relative(actual, expected) < (1e-4 if steep else 2e-5 if backend == "cpu" else 5e-5), name


@both_kinds
@pytest.mark.parametrize("case", ["apart", "far"])
def test_raw_states_in_any_order(backend: str, case: str, kind: str) -> None:
    raw = {name: 2 * torch.atanh(pole) for name, pole in poles(case, 21).items()}
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    leaf = raw["new_a"][:, order].requires_grad_()
    wide = [raw["old_a"].double(), raw["new_a"].double().requires_grad_()]
    value = fused_distance(raw["old_a"], raw["old_a"], leaf, leaf, kind=kind, backend=backend)
    exact = fused_distance(wide[0], wide[0], wide[1], wide[1], kind=kind, backend="reference")
    assert relative(value.detach(), exact.detach()) < 5e-5
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    assert relative(slope, torch.autograd.grad(exact.sum(), wide[1])[0][:, order]) < 5e-5


def of_sine(kind: str, sine: Tensor) -> Tensor:
    return 2 * sine.square() if kind == "chordal" else sine.asin().square()


@both_kinds
def test_one_pole_is_its_formula(backend: str, kind: str) -> None:
    a = torch.tensor([[-0.999], [-0.5], [0.0], [0.7], [0.99999]])
    value = between(kind, a, a.flip(0), backend=backend)
    wide, other = a.double(), a.double().flip(0)
    expected = of_sine(kind, (wide - other) / (1 - wide * other)).squeeze(-1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)


@both_kinds
def test_extreme_raw_states(backend: str, kind: str) -> None:
    x = torch.tensor([[-15.0], [-1.0], [3.0], [14.0]])
    value = fused_distance(x, x, x.flip(0), x.flip(0), kind=kind, backend=backend)
    expected = of_sine(kind, torch.tanh((x - x.flip(0)).double() / 2)).squeeze(-1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)


@both_kinds
@pytest.mark.parametrize("n", [1, 8, 30])
def test_distances_of_every_size(backend: str, n: int, kind: str) -> None:
    """From poles that differ by 1e-10 to angles of many degrees, in one call."""
    g = torch.Generator().manual_seed(n)
    gap = torch.logspace(-10, -1, 60).unsqueeze(-1)
    old = torch.where(gap < 1e-7, 0.0, 1.0) * torch.rand(60, n, generator=g).sub(0.5).sort(-1).values
    new = (old + gap * torch.randn(60, n, generator=g)).sort(-1).values.requires_grad_()
    value, wide = between(kind, old, new, backend=backend), new.detach().double().requires_grad_()
    exact = between(kind, old.double(), wide, backend="reference")
    assert relative(value.detach().unsqueeze(-1), exact.detach().unsqueeze(-1)) < (2e-5 if backend == "cpu" else 1e-3)
    (slope,), (expected,) = (torch.autograd.grad(v.sum(), x) for v, x in ((value, new), (exact, wide)))
    assert relative(slope, expected) < (1e-4 if backend == "cpu" else 1e-3)


def test_geodesic_where_some_systems_need_every_angle(backend: str) -> None:
    """Those with angles near 90 degrees among others, in more than one dimension, and more than fit one piece."""
    near, far = poles("apart", 40, 30), poles("opposite", 40, 30)
    chosen = torch.arange(30).unsqueeze(-1) % 3 == 0
    old, new = (torch.where(chosen, far[name], near[name]).view(5, 6, 40) for name in near)
    leaf = new.clone().requires_grad_()
    value = between("geodesic", old, leaf, backend=backend)
    wide = new.double().requires_grad_()
    exact = between("geodesic", old.double(), wide, backend="reference")
    assert relative(value.detach().view(30, 1), exact.detach().view(30, 1)) < 5e-5
    (slope,), (expected,) = (torch.autograd.grad(v.sum(), x) for v, x in ((value, leaf), (exact, wide)))
    assert relative(slope.view(30, 40), expected.view(30, 40)) < 1e-4


def test_geodesic_of_many_grids_is_that_of_each(backend: str) -> None:
    """Systems whose quadratures differ share threads, lanes and kept rules."""
    g = torch.Generator().manual_seed(0)
    width = torch.linspace(0, 2.3, 150).exp().unsqueeze(-1) / 4
    old = width * torch.randn(150, 4, generator=g)
    new = old + 0.02 * torch.randn(150, 4, generator=g)
    together = fused_distance(old, old, new, new, kind="geodesic", backend=backend)
    alone = torch.cat(
        [
            fused_distance(x, x, y, y, kind="geodesic", backend=backend)
            for x, y in zip(old.split(1), new.split(1), strict=True)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=0)  # each within 5e-5 of the exact value, below
    exact = fused_distance(*(x.double() for x in (old, old, new, new)), kind="geodesic", backend="reference")
    assert relative(together.unsqueeze(-1), exact.unsqueeze(-1)) < (5e-5 if backend == "cpu" else 2e-3)  # 1 - tanh


def test_slow_and_repeated_poles(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    slow = torch.exp(-0.001 * torch.arange(1, 17)).expand(3, 16).contiguous()
    repeated = torch.rand(5, 2, generator=g).mul(0.9).repeat_interleave(8, -1)
    for old in (slow, repeated):
        new = old + 1e-5 * torch.randn(old.shape, generator=g)
        for kind in ("chordal", "geodesic"):
            exact = between(kind, old.double(), new.double(), backend="reference")
            assert relative(between(kind, old, new, backend=backend).unsqueeze(-1), exact.unsqueeze(-1)) < 2e-4
        sine, _ = rotation_lattice(*(x.sort(-1).values for x in (old, new)), backend=backend)
        wide, _ = rotation_lattice(*(x.double().sort(-1).values for x in (old, new)), backend="reference")
        assert relative(sine, wide) < 2e-4


@pytest.mark.parametrize("n", [1, 2, 17])
def test_equality_is_exactly_zero(backend: str, n: int) -> None:
    states = poles("equal", n)
    leaves = [pole.clone().requires_grad_() for pole in states.values()]
    for kind in ("chordal", "geodesic"):
        value = between(kind, *leaves, backend=backend)
        assert not value.any()
        assert not any(slope.any() for slope in torch.autograd.grad(value.sum(), leaves))
    sine, cosine = rotation_lattice(*leaves, backend=backend)
    assert not sine.any()
    assert_near(cosine @ cosine.mT, torch.eye(n).expand(5, n, n), 1e-5, "orthogonal")
    assert not any(slope.any() for slope in torch.autograd.grad(sine.square().sum(), leaves))


def test_gradient_of_either_output_alone(backend: str) -> None:
    states = poles("apart", 9)
    for index in (0, 1):
        assert_equivalent(lambda i=index, **x: rotation_lattice(**x)[i], states, backend=backend, **FLOAT32)
    leaf = states["new_a"].clone().requires_grad_()
    torch.autograd.grad(between("chordal", states["old_a"], leaf, backend=backend).sum(), leaf)


@both_kinds
def test_nan_and_unstable_poles_give_nan_for_their_system_alone(backend: str, kind: str) -> None:
    states = poles("apart", 5)
    states["new_a"][1, 2], states["new_a"][3, 4] = float("nan"), 1.5
    leaf = states["new_a"].requires_grad_()
    value = between(kind, states["old_a"], leaf, backend=backend)
    assert value.isnan().tolist() == [False, True, False, True, False]
    sine, _ = rotation_lattice(states["old_a"], leaf.detach(), backend=backend)
    assert sine.isnan().any(-1).any(-1).tolist() == [False, True, False, True, False]


def test_threads_do_not_change_the_result() -> None:
    states = poles("apart", 30, 200)

    def run() -> list[Tensor]:
        leaves = [pole.clone().requires_grad_() for pole in states.values()]
        value = between("chordal", *leaves) + between("geodesic", *leaves)
        sine, cosine = rotation_lattice(*leaves)
        return [value, sine, cosine, *torch.autograd.grad(value.sum() + (sine * cosine).sum(), leaves)]

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert_rounding(two, one, terms=1024)


def test_no_systems_and_wrong_shapes(backend: str) -> None:
    empty = torch.zeros(0, 3)
    assert between("chordal", empty, empty, backend=backend).shape == (0,)
    assert between("geodesic", empty, empty, backend=backend).shape == (0,)
    assert rotation_lattice(empty, empty, backend=backend)[0].shape == (0, 3, 3)
    with pytest.raises(ConfigError, match="new_a has shape"):
        rotation_lattice(torch.zeros(2, 3), torch.zeros(2, 4), backend=backend)


def test_reference_passes_gradcheck_real_and_complex() -> None:
    old, new = (pole[:2].double().requires_grad_() for pole in poles("far", 3).values())
    assert torch.autograd.gradcheck(rotation_lattice, (old, new))
    for kind in ("chordal", "geodesic"):
        assert torch.autograd.gradcheck(partial(between, kind), (old, new))
    turned = [torch.polar(pole.detach().abs(), 3 * pole.detach()).requires_grad_() for pole in (old, new)]
    assert torch.autograd.gradcheck(rotation_lattice, turned)
