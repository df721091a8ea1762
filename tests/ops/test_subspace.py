"""Lattice of rotations, chordal and geodesic distance: closed forms, equality, extremes and gradients."""

from functools import partial

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import fused_distance, rotation_lattice
from tests.ops.cases import assert_near

both_kinds = pytest.mark.parametrize("kind", ["chordal", "geodesic"])


def poles(n: int, distance: float, systems: int = 5) -> tuple[Tensor, Tensor]:
    """Sorted old and new poles; distance: of the new ones, in the coordinates of raw states."""
    g = torch.Generator().manual_seed(n)
    raw = torch.randn(systems, n, generator=g)
    new = raw + distance * torch.randn(systems, n, generator=g)
    return torch.tanh(raw / 2).sort(-1).values, torch.tanh(new / 2).sort(-1).values


def between(kind: str, old_a: Tensor, new_a: Tensor) -> Tensor:
    """Distance of poles as they are."""
    return fused_distance(old_a, old_a, new_a, new_a, kind=kind, soft_normalize=False)


def of_sine(kind: str, sine: Tensor) -> Tensor:
    return 2 * sine.square() if kind == "chordal" else sine.asin().square()


@both_kinds
def test_one_pole_is_its_formula(kind: str) -> None:
    a = torch.tensor([[-0.999], [-0.5], [0.0], [0.7], [0.99999]])
    wide, other = a.double(), a.double().flip(0)
    expected = of_sine(kind, (wide - other) / (1 - wide * other)).squeeze(-1)
    torch.testing.assert_close(between(kind, a, a.flip(0)).double(), expected, rtol=1e-5, atol=0)


@both_kinds
def test_extreme_raw_states(kind: str) -> None:
    x = torch.tensor([[-15.0], [-1.0], [3.0], [14.0]])
    value = fused_distance(x, x, x.flip(0), x.flip(0), kind=kind)
    expected = of_sine(kind, torch.tanh((x - x.flip(0)).double() / 2)).squeeze(-1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)


@both_kinds
def test_raw_states_in_any_order(kind: str) -> None:
    old, new = (2 * torch.atanh(pole) for pole in poles(21, 0.1))
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    leaf, shuffled = new.clone().requires_grad_(), new[:, order].requires_grad_()
    value, same = (fused_distance(old, old, x, x, kind=kind) for x in (leaf, shuffled))
    assert_near(same, value, 1e-6, "value")
    slopes = [torch.autograd.grad(v.sum(), x)[0] for v, x in ((value, leaf), (same, shuffled))]
    assert_near(slopes[1], slopes[0][:, order], 1e-5, "gradient")


@pytest.mark.parametrize("n", [1, 2, 17])
def test_equality_is_exactly_zero(n: int) -> None:
    leaves = [pole.clone().requires_grad_() for pole in poles(n, 0.0)]
    for kind in ("chordal", "geodesic"):
        value = between(kind, *leaves)
        assert not value.any()
        assert not any(slope.any() for slope in torch.autograd.grad(value.sum(), leaves))
    sine, cosine = rotation_lattice(*leaves)
    assert not sine.any()
    assert_near(cosine @ cosine.mT, torch.eye(n).expand(5, n, n), 1e-5, "orthogonal")


@both_kinds
def test_nan_and_unstable_poles_give_nan_for_their_system_alone(kind: str) -> None:
    old, new = poles(5, 0.1)
    new[1, 2], new[3, 4] = float("nan"), 1.5
    assert between(kind, old, new.requires_grad_()).isnan().tolist() == [False, True, False, True, False]
    sine, _ = rotation_lattice(old, new.detach())
    assert sine.isnan().any(-1).any(-1).tolist() == [False, True, False, True, False]


def test_no_systems_and_wrong_shapes() -> None:
    empty = torch.zeros(0, 3)
    assert between("chordal", empty, empty).shape == between("geodesic", empty, empty).shape == (0,)
    assert rotation_lattice(empty, empty)[0].shape == (0, 3, 3)
    with pytest.raises(ConfigError, match="new_a has shape"):
        rotation_lattice(torch.zeros(2, 3), torch.zeros(2, 4))


def test_gradcheck_real_and_complex() -> None:
    old, new = (pole[:2].double().requires_grad_() for pole in poles(3, 1.0))
    assert torch.autograd.gradcheck(rotation_lattice, (old, new))
    for kind in ("chordal", "geodesic"):
        assert torch.autograd.gradcheck(partial(between, kind), (old, new))
    turned = [torch.polar(pole.detach().abs(), 3 * pole.detach()).requires_grad_() for pole in (old, new)]
    assert torch.autograd.gradcheck(rotation_lattice, turned)
