"""`output` by sampled frequencies: against the closed form, impulse responses of dense systems, and gradcheck."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops.distances import pieces
from infssm.ssm import StateSpace, distance
from tests.ssm.reference import random_system


def low_rank(n, rank, *, seed=0, lead=(), is_complex=False):
    """A stable random system with a low-rank part."""
    g = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if is_complex else torch.float64
    a = 0.5 + 0.45 * torch.rand(*lead, n, generator=g, dtype=torch.float64)
    if is_complex:
        a = a * torch.exp(2j * torch.rand(*lead, n, generator=g, dtype=torch.float64))
    u, v = torch.randn(2, *lead, rank, n, generator=g, dtype=dtype) * 0.4 / n**0.5
    c, b = torch.randn(2, *lead, n, generator=g, dtype=dtype)
    return StateSpace(a, c, b, u=-u, v=u.conj() + 0.1 * v)


def response(space: StateSpace, steps=3000) -> torch.Tensor:
    """``c A^t b`` of the dense system, ``[..., steps]``."""
    A, x, found = space.dense(), space.b.unsqueeze(-1), []
    for _ in range(steps):
        found.append((space.c.unsqueeze(-2) @ x).squeeze(-1).squeeze(-1))
        x = A @ x
    return torch.stack(found, dim=-1)


def energy(old, new):
    return (response(old) - response(new)).abs().square().sum(-1)


@pytest.mark.parametrize("is_complex", [False, True])
def test_equals_the_closed_form(is_complex):
    g = torch.Generator().manual_seed(0)
    for n, m in ((4, 4), (3, 7)):
        old, new = (random_system(k, g, radius=0.9, is_complex=is_complex) for k in (n, m))
        closed = distance(old, new, kind="output")
        for count in (512, 450):  # and one that 16 does not divide
            sampled = distance(old, new, kind="output", frequencies=count)
            torch.testing.assert_close(sampled, closed, rtol=1e-6, atol=0)


def test_poles_near_one_need_few_frequencies():
    """Evenly spaced frequencies would alias: 0.999^128 = 0.88."""
    g = torch.Generator().manual_seed(0)
    a = 1 - torch.logspace(-3, -0.3, 16, dtype=torch.float64)
    b, c = torch.randn(2, 16, generator=g, dtype=torch.float64)
    old, new = StateSpace(a, c, b), StateSpace(a * 0.99, c * 1.1, b)
    closed = distance(old, new, kind="output")
    torch.testing.assert_close(distance(old, new, kind="output", frequencies=256), closed, rtol=1e-6, atol=0)
    torch.testing.assert_close(distance(old, new, kind="output", frequencies=128), closed, rtol=1e-3, atol=0)


@pytest.mark.parametrize("is_complex", [False, True])
def test_low_rank_systems_equal_their_dense_responses(is_complex):
    old = low_rank(6, 1, is_complex=is_complex)
    diagonal = random_system(3, torch.Generator().manual_seed(5), radius=0.8, is_complex=is_complex)
    for new in (low_rank(6, 1, seed=1, is_complex=is_complex), low_rank(4, 3, seed=2, is_complex=is_complex), diagonal):
        value = distance(old, new, kind="output", frequencies=512)
        torch.testing.assert_close(value, energy(old, new), rtol=1e-8, atol=0)
        torch.testing.assert_close(value, distance(old.to_poles(), new.map(lambda x: x + 0j).to_poles(), kind="output"))


def test_s4_by_the_bilinear_rule():
    """S4's normal plus low-rank transition, discretised, is diagonal plus rank one: 2 (1 - step/2 A)^-1 - 1."""
    n, step = 8, 0.1
    g = torch.Generator().manual_seed(0)
    poles = torch.complex(-0.5 * torch.ones(n), 3.14 * torch.arange(n).float()).to(torch.complex128)
    p, b, c = (torch.randn(2, 3, n, generator=g, dtype=torch.float64)[0] + 0j).unbind(0)
    continuous = torch.diag(poles) - p.unsqueeze(-1) * p.conj()
    eye = torch.eye(n, dtype=poles.dtype)
    inverse = torch.linalg.inv(eye - step / 2 * continuous)
    d = 1 / (1 - step / 2 * poles)
    pull = step / 2 / (1 + step / 2 * (p.conj() * d * p).sum())
    space = StateSpace(2 * d - 1, c, step * inverse @ b, u=-2 * pull * (d * p)[None], v=(p.conj() * d)[None])
    torch.testing.assert_close(space.dense(), inverse @ (eye + step / 2 * continuous))
    silent = space.map(torch.zeros_like)
    torch.testing.assert_close(distance(silent, space, kind="output", frequencies=2048), energy(silent, space))


def test_gradients_and_pieces(monkeypatch):
    old, new = low_rank(3, 2, lead=(2,)), low_rank(4, 1, lead=(2,), seed=1)
    tensors = [x.clone().requires_grad_() for s in (old, new) for x in (s.a, s.c, s.b, s.u, s.v)]

    def value(*x):
        spaces = (StateSpace(a, c, b, u=u, v=v) for a, c, b, u, v in (x[:5], x[5:]))
        return distance(*spaces, kind="output", frequencies=256, validate=False)

    torch.autograd.gradcheck(value, tensors)
    whole = torch.autograd.grad(value(*tensors).square().sum(), tensors)
    monkeypatch.setattr(pieces, "CPU_ELEMENTS", 1)
    split = torch.autograd.grad(value(*tensors).square().sum(), tensors)
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_equal_systems_have_distance_and_gradient_zero():
    old = low_rank(5, 1, lead=(3,))
    new = old.map(lambda x: x.clone().requires_grad_())
    value = distance(old, new, kind="output")
    assert (value == 0).all()
    for slope in torch.autograd.grad(value.sum(), (new.a, new.c, new.b, new.u, new.v)):
        assert (slope == 0).all()


def test_a_layer_without_decay_is_finite():
    """DeltaNet: poles at 1 that the input does not reach."""
    k = torch.nn.functional.normalize(torch.randn(2, 5, dtype=torch.float64), dim=-1)
    q, beta = torch.randn(2, 5, dtype=torch.float64), 0.6
    old, new = (
        StateSpace(torch.ones(5).double(), q[i], beta * k[i], u=-beta * k[i, None], v=k[i, None]) for i in (0, 1)
    )
    value = distance(old, new, kind="output", frequencies=512, validate=False)
    gains = [beta * (q[i] * k[i]).sum() for i in (0, 1)]
    torch.testing.assert_close(value, (gains[0] - gains[1]) ** 2 / (1 - (1 - beta) ** 2), rtol=1e-6, atol=0)


def test_refusals():
    old, new = low_rank(3, 1), low_rank(3, 1, seed=1)
    with pytest.raises(ConfigError, match=r"needs poles.*space.to_poles"):
        distance(old, new, kind="martin")
    with pytest.raises(ConfigError, match="frequencies=7; give an even number"):
        distance(old, new, kind="output", frequencies=7)
    with pytest.raises(ConfigError, match=r"new.b is None"):
        distance(old, StateSpace(new.a, new.c, u=new.u, v=new.v), kind="output")
    diagonal = StateSpace(old.a, old.c, old.b)
    with pytest.raises(ConfigError, match="soft_normalize=False"):
        distance(diagonal, new, kind="output", soft_normalize=True)
    # Like complex systems, those with a low-rank part are left as they are.
    torch.testing.assert_close(
        distance(old, new, kind="output", soft_normalize=True), distance(old, new, kind="output")
    )
