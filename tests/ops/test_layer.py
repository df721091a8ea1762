"""A Mamba-2 layer in one call, projections and norm included, against its parts one by one."""

import pytest
import torch

from infssm.ops import layer as whole
from infssm.ops.layer import LayerWeights, can_mix
from infssm.ops.projected import HeadWeights
from tests.ops.cases import assert_near
from tests.ops.test_projected import mixer, results


@pytest.mark.parametrize("record", [False, True])
def test_equals_the_layer_in_double_precision(record: bool, backend: str) -> None:
    layer, exact = mixer(1), mixer(1).double()
    x = torch.randn(2, 75, 24, requires_grad=True)
    found = results(layer, x, record=record)
    expected = results(exact, x.detach().double().requires_grad_(), record=record)
    names = ("y", "x", *(name for name, _ in layer.named_parameters()))
    for name, actual, value in zip(names, found, expected, strict=True):
        assert_near(actual, value, 1e-4, f"{name} {backend}")


@pytest.mark.parametrize("name", ["in_proj", "norm", "out_proj"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_its_parts_run(name: str, hook: str) -> None:
    layer, calls = mixer(1), []
    x = torch.randn(2, 70, 24, requires_grad=True)
    expected = results(layer, x, record=False)
    getattr(getattr(layer, name), hook)(lambda *_: calls.append(name))
    found = results(layer, x, record=False)
    assert calls == [name]
    for i, (actual, value) in enumerate(zip(found, expected, strict=True)):
        assert_near(actual, value, 1e-4, f"{i}")


def test_gradients_that_are_asked_for(backend: str) -> None:
    """Frozen projections, an input without gradient, and states alone, without the output."""
    layer = mixer(1)
    layer.in_proj.weight.requires_grad_(False)
    layer.out_proj.weight.requires_grad_(False)
    layer(torch.randn(1, 70, 24)).sum().backward()
    assert layer.in_proj.weight.grad is None
    assert layer.out_proj.weight.grad is None
    assert layer.norm.weight.grad is not None, backend

    layer = mixer(1)
    weights = HeadWeights(layer.conv1d.weight, layer.conv1d.bias, layer.A_log, layer.D, layer.dt_bias)
    given = LayerWeights(layer.in_proj.weight, weights, layer.norm.weight, layer.out_proj.weight)
    x = torch.randn(2, 30, 24, requires_grad=True)
    if not can_mix(x, given, 16):
        return
    found = whole.mix(x, given, whole.LayerSizes(48, 1, 1e-5))
    (found.convolved[..., 48:].square().sum() + found.delta.sum()).backward()
    one_by_one = mixer(1).double()
    double = x.detach().double().requires_grad_()
    projected = one_by_one.in_proj(double)
    states = torch.nn.functional.silu(one_by_one.conv1d(projected[..., 48:-4].mT)[..., :30].mT)[..., 48:]
    (states.square().sum() + projected[..., -4:].sum()).backward()
    assert_near(x.grad, double.grad, 1e-4, "x")
    assert_near(layer.in_proj.weight.grad, one_by_one.in_proj.weight.grad, 1e-4, "in_proj")
    assert not layer.out_proj.weight.grad.any()


def test_twice_through_the_graph() -> None:
    """What the first backward wrote over must not have been saved for the second."""
    layer = mixer(1)
    x = torch.randn(2, 70, 24, requires_grad=True)
    y = layer(x).square().sum()
    first, second = (torch.autograd.grad(y, [x, *layer.parameters()], retain_graph=keep) for keep in (True, False))
    for i, (actual, value) in enumerate(zip(second, first, strict=True)):
        assert_near(actual, value, 0.0, f"{i}")
