"""The fused output distance against the impulse responses themselves."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops import fused_distance

NAMES = ("a", "c", "b")


def pair(n, gap, *, lead=(3, 4)):
    generator = torch.Generator().manual_seed(n)
    old = [torch.rand(*lead, n, generator=generator) * 0.9, *torch.randn(2, *lead, n, generator=generator)]
    return old, [t + gap * torch.randn(t.shape, generator=generator) for t in old]


def distance(old, new, **options):
    return fused_distance(old[0], old[1], new[0], new[1], kind="output", old_b=old[2], new_b=new[2], **options)


def responses(states, steps=120):
    """c a^t b for t < steps, in float64: poles are below tanh(1/2), so the rest is below 1e-40."""
    a, c, b = (torch.tanh(t.double() / 2) for t in states)
    return torch.stack([(c * a**t * b).sum(-1) for t in range(steps)], dim=-1)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("n", [1, 5, 16, 33])
def test_energy_of_the_difference_and_its_gradient(backend, n, gap):
    old, new = pair(n, gap)
    leaves = [t.clone().requires_grad_() for t in new]
    wide = [t.double().requires_grad_() for t in new]
    value = distance(old, leaves, backend=backend)
    expected = (responses(old) - responses(wide)).square().sum(-1)
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=1e-5 * float(expected.detach().max()))
    slopes = torch.autograd.grad(value.sum(), leaves)
    for name, actual, truth in zip(NAMES, slopes, torch.autograd.grad(expected.sum(), wide), strict=True):
        error = (actual.double() - truth).abs().max() / truth.abs().max()
        assert error < 2e-4, name


def test_normalised_states_are_taken_as_they_are(backend):
    old, new = pair(17, 0.3)
    leaves = [t.clone().requires_grad_() for t in new]
    expected = distance(old, leaves, backend=backend)
    values = [torch.tanh(t / 2) for t in leaves]
    actual = distance([torch.tanh(t / 2) for t in old], values, soft_normalize=False, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_equality_has_no_value_and_no_gradient(backend):
    old, _ = pair(16, 0.0)
    leaves = [t.clone().requires_grad_() for t in old]
    value = distance(old, leaves, backend=backend)
    assert value.abs().max() <= (0 if backend == "cpu" else 1e-15)
    for slope in torch.autograd.grad(value.sum(), leaves):
        assert slope.abs().max() <= (0 if backend == "cpu" else 1e-6)


def test_gradients_of_the_old_side_and_scalar_transitions(backend):
    old, new = pair(4, 0.3)
    old = [t.requires_grad_() for t in old]
    gradients = torch.autograd.grad(distance(old, new, backend=backend).sum(), old)
    swapped = torch.autograd.grad(distance(new, old, backend=backend).sum(), old)
    for one, other in zip(gradients, swapped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    scalar = [[s[0].detach()[..., :1], s[1].detach(), s[2].detach()] for s in (old, new)]
    expected = (responses(scalar[0]) - responses(scalar[1])).square().sum(-1)
    torch.testing.assert_close(distance(*scalar, backend=backend).double(), expected, rtol=1e-4, atol=1e-6)


def test_float64_gradients_are_exact():
    old, new = pair(3, 0.3, lead=(2,))
    tensors = [t.double().requires_grad_() for t in (*old, *new)]
    assert torch.autograd.gradcheck(lambda *t: distance(t[:3], t[3:], backend="reference"), tensors)


def test_nan_reaches_the_value(backend):
    old, new = pair(16, 0.1)
    new[2][1, 2, 7] = float("nan")
    value = distance(old, new, backend=backend)
    assert value[1, 2].isnan()
    assert value.isnan().sum() == 1


def test_operator_passes_torchs_own_checks():
    old, new = pair(5, 0.1)
    leaves = [t.requires_grad_() for t in new]
    compiled = torch.compile(distance, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(old, leaves), distance(old, leaves))


def test_missing_b_is_named():
    old, new = pair(4, 0.1)
    with pytest.raises(ConfigError, match="old_b and new_b"):
        fused_distance(old[0], old[1], new[0], new[1], kind="output")
