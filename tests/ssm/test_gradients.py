"""Gradients: gradcheck of every kind, exact zeros at equality, finite values at the awkward points."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from infssm.ssm import StateSpace, distance, gram, gram_dense, list_distances, principal_angles
from tests.ssm.reference import random_system

KINDS = list_distances()
ZERO_AT_EQUALITY = [kind for kind in KINDS if kind != "simplified"]


def leaves(space):
    return tuple(x.detach().requires_grad_() for x in (space.a, space.c, space.b))


def on_tensors(kind):
    return lambda oa, oc, ob, na, nc, nb: distance(StateSpace(oa, oc, ob), StateSpace(na, nc, nb), kind=kind)


def pair(n, is_complex=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (random_system(n, generator, radius=0.8, is_complex=is_complex) for _ in range(2))


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, n, is_complex):
    old, new = pair(n, is_complex)
    assert gradcheck(on_tensors(kind), leaves(old) + leaves(new))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_scalar_transitions(kind):
    old, new = (StateSpace(x.a[:1], x.c, x.b) for x in pair(4))
    assert gradcheck(on_tensors(kind), leaves(old) + leaves(new))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_with_repeated_poles(kind):
    old, new = pair(4)
    old = StateSpace(old.a[[0, 0, 1, 1]], old.c, old.b)
    new = StateSpace(new.a[[0, 0, 0, 1]], new.c, new.b)
    assert gradcheck(on_tensors(kind), leaves(old) + leaves(new))


@pytest.mark.parametrize("kind", ["aligned", "chordal", "martin", "output", "simplified"])
def test_second_derivatives(kind):
    old, new = pair(3)
    assert gradgradcheck(on_tensors(kind), leaves(old) + leaves(new))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [1, 2, 16])
@pytest.mark.parametrize("kind", ZERO_AT_EQUALITY)
def test_zero_value_and_gradient_at_equality(kind, n, dtype):
    generator = torch.Generator().manual_seed(n)
    space = random_system(n, generator, is_complex=dtype.is_complex).map(lambda x: x.to(dtype))
    old, new = leaves(space), leaves(space)
    value = on_tensors(kind)(*old, *new)
    assert value.item() == 0
    grads = torch.autograd.grad(value, (*old, *new), allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads)
    assert grads[0] is not None
    assert grads[3] is not None


@pytest.mark.parametrize("kind", ZERO_AT_EQUALITY)
def test_smooth_through_equality(kind):
    """Along a line through equality the squared distance is a parabola: second differences agree on both sides."""
    generator = torch.Generator().manual_seed(5)
    old = random_system(3, generator, radius=0.7)
    step = random_system(3, generator, radius=0.7)

    def at(t):
        return distance(old, StateSpace(old.a + t * step.a, old.c + t * step.c, old.b + t * step.b), kind=kind)

    curvature = at(1e-4) / 1e-8
    torch.testing.assert_close(at(-1e-4) / 1e-8, curvature, rtol=1e-2, atol=0)
    torch.testing.assert_close(at(1e-6) / 1e-12, curvature, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", ZERO_AT_EQUALITY)
def test_gradient_near_equality_in_float32(kind):
    generator = torch.Generator().manual_seed(6)
    wide = random_system(16, generator, radius=0.7, dtype=torch.float32)
    near = wide.map(lambda x: x + 1e-4 * torch.randn(x.shape, generator=generator))

    def gradient(cast):
        old, new = leaves(wide.map(cast)), leaves(near.map(cast))
        return torch.autograd.grad(on_tensors(kind)(*old, *new), new[0])[0].double()

    exact = gradient(torch.Tensor.double)
    assert (gradient(torch.Tensor.float) - exact).norm() / exact.norm() < 1e-3


def test_gradcheck_of_grams_and_angles():
    old, new = pair(3, is_complex=True)
    assert gradcheck(gram, (*leaves(old)[:2], *leaves(new)[:2]))
    old, new = pair(3)
    assert gradcheck(
        lambda a, b: principal_angles(StateSpace(a, a), StateSpace(b, b)), (leaves(old)[0], leaves(new)[0])
    )
    generator = torch.Generator().manual_seed(0)
    matrices = [0.4 * torch.randn(2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    rows = [torch.randn(2, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    inputs = tuple(x.requires_grad_() for x in (matrices[0], rows[0], matrices[1], rows[1]))
    assert gradcheck(gram_dense, inputs)


@pytest.mark.parametrize("kind", ["martin", "chordal", "geodesic", "output"])
def test_gradcheck_through_dense_systems(kind):
    generator = torch.Generator().manual_seed(1)

    def system():
        matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        matrix = 0.8 * matrix / torch.linalg.eigvals(matrix).abs().max()
        rows = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        return tuple(x.requires_grad_() for x in (matrix, *rows))

    def fn(A, C, B, A2, C2, B2):
        return distance(StateSpace.from_dense(A, C, B), StateSpace.from_dense(A2, C2, B2), kind=kind)

    assert gradcheck(fn, system() + system())
