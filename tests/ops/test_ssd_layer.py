"""A Mamba-2 layer between its projections in one call against the same operations one by one."""

import pytest
import torch

from infssm.models.mamba2 import Mamba2Mixer
from infssm.ops.backend import NATIVE, can_fuse
from tests.ops.cases import assert_near


def mixer(groups: int, n: int = 16) -> Mamba2Mixer:
    torch.manual_seed(0)
    layer = Mamba2Mixer(24, d_state=n, headdim=12, ngroups=groups)
    with torch.no_grad():
        layer.D.normal_()
        layer.norm.weight.normal_()
    return layer


class Tap:
    """Keeps what the layer emits."""

    include_dt_bias, zoh, stop = True, False, False

    def __init__(self) -> None:
        self.states = []

    def emit(self, _mixer, directions) -> None:
        self.states += directions


def results(layer: Mamba2Mixer, x: torch.Tensor, *, record: bool) -> list[torch.Tensor]:
    tap = Tap() if record else None
    layer.tap = tap
    y = layer(x)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    if tap is not None:
        (states,) = tap.states
        loss = loss + states.a.square().sum() + (states.b * states.c).sum() + states.delta.sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_the_operations_one_by_one(groups: int, record: bool, backend: str, monkeypatch) -> None:
    layer, exact = mixer(groups), mixer(groups).double()
    x = torch.randn(2, 75, 24, requires_grad=True)
    if backend == "reference":
        monkeypatch.setattr("infssm.models.mamba2.can_fuse", lambda *_: False)
    found = results(layer, x, record=record)
    expected = results(exact, x.detach().double().requires_grad_(), record=record)
    names = ("y", "x", *(name for name, _ in layer.named_parameters()))
    for name, actual, value in zip(names, found, expected, strict=True):
        assert_near(actual, value, 1e-4, name)


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 24, "headdim": 12, "d_conv": 3},  # the convolution apart from the chunks
        {"d_model": 24, "headdim": 12, "expand": 3},  # channels that fill no vector
        {"d_model": 80, "headdim": 64, "expand": 4},  # more heads than one block holds
    ],
)
def test_convolution_within_the_chunks_and_apart(sizes: dict[str, int], backend: str) -> None:
    torch.manual_seed(0)
    layer = Mamba2Mixer(d_state=9, **sizes)
    exact = Mamba2Mixer(d_state=9, **sizes).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 131, sizes["d_model"], requires_grad=True)
    found = results(layer, x, record=False)
    expected = results(exact, x.detach().double().requires_grad_(), record=False)
    names = ("y", "x", *(name for name, _ in layer.named_parameters()))
    for name, actual, value in zip(names, found, expected, strict=True):
        assert_near(actual, value, 1e-4, f"{name} {backend}")


def test_float32_on_the_cpu_alone_is_fused() -> None:
    x = torch.randn(1, 5, 24)
    assert can_fuse([x, None, x]) == (NATIVE is not None)
    assert not can_fuse([x, x.double()])
    assert not can_fuse([x[:, :0]])
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_fuse([x])


def test_frozen_parameters_get_no_gradient() -> None:
    layer = mixer(1)
    layer.A_log.requires_grad_(False)
    x = torch.randn(1, 70, 24)
    layer(x).sum().backward()
    assert layer.A_log.grad is None
    assert layer.D.grad is not None
    with torch.no_grad():
        assert_near(layer(x), layer(x.requires_grad_()).detach(), 0.0, "without gradient")


def test_states_alone_without_the_output() -> None:
    layer, exact = mixer(1), mixer(1).double()
    x = torch.randn(2, 30, 24, requires_grad=True)
    double = x.detach().double().requires_grad_()
    for one, given in ((layer, x), (exact, double)):
        one.tap = Tap()
        one(given)
        (states,) = one.tap.states
        ((states.b * states.c).sum() + states.delta.sum()).backward()
    assert_near(x.grad, double.grad, 1e-4, "x")
    assert_near(layer.in_proj.weight.grad, exact.in_proj.weight.grad, 1e-4, "in_proj")
    assert layer.out_proj.weight.grad is None


def test_twice_through_the_graph() -> None:
    """What the first backward wrote over must not have been saved for the second."""
    layer = mixer(1)
    x = torch.randn(2, 70, 24, requires_grad=True)
    y = layer(x).square().sum()
    first, second = (torch.autograd.grad(y, [x, *layer.parameters()], retain_graph=keep) for keep in (True, False))
    for i, (actual, value) in enumerate(zip(second, first, strict=True)):
        assert_near(actual, value, 0.0, f"{i}")
