"""Probes of flash-linear-attention and Mamba-3: recorded systems give the impulse responses of the layers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ssm import StateSpace, distance, record_states, state_parameters
from tests.ssm.fla_layers import (
    NAMES,
    WIDTH,
    GatedLinearAttention,
    HGRN2Attention,
    Layer,
    Mamba3OfRanks,
    Mamba3WithHeavyTail,
    RWKV6Attention,
    RWKV7Attention,
    heavy_tail,
)

TOKENS, STEPS = 4, 8


@pytest.fixture
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A random layer in float64 under the name that the library gives it."""
    module, name = NAMES[request.param]
    if request.param is Mamba3WithHeavyTail:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(heavy_tail_activation=heavy_tail))
    torch.manual_seed(0)
    found = type(name, (request.param,), {"__module__": module})().double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return found


def record(layer: Layer, **kwargs: Any) -> StateSpace:
    with record_states(layer) as states:
        layer(torch.randn(2, TOKENS, WIDTH).double(), **kwargs)
    (space,) = states.flat()
    return space


def response(space: StateSpace) -> Tensor:
    """``c A^t b``: [batch, steps, tokens, ...]; real also where the poles are complex."""
    A, x, found = space.dense(), space.b, []
    for _ in range(STEPS):
        found.append((space.c * x).sum(-1))
        x = (A @ x.unsqueeze(-1)).squeeze(-1)
    stacked = torch.stack(found, dim=1)
    return stacked.real if stacked.is_complex() else stacked


every_layer = pytest.mark.parametrize("layer", list(NAMES), indirect=True, ids=lambda cls: cls.__name__)


@every_layer
def test_impulse_responses_are_the_layer_s_own(layer: Layer) -> None:
    bound = {"lower_bound": torch.full((8,), 0.3).double()} if isinstance(layer, HGRN2Attention) else {}
    with torch.no_grad():
        found = response(record(layer, **bound))
        assert found.abs().max() > 1e-3
        for token in range(TOKENS):
            held = {name: x[:, token : token + 1].repeat_interleave(STEPS, 1) for name, x in layer.args.items()}
            held["v"] = torch.zeros_like(held["v"])
            held["v"][:, 0] = 1
            torch.testing.assert_close(found[:, :, token], layer.rule(**held)[..., 0], rtol=0, atol=1e-10)


@every_layer
def test_gradients_reach_what_the_probe_names(layer: Layer) -> None:
    old, new = record(layer).detach(), record(layer)
    distance(old, new, kind="output", validate=False).sum().backward()
    touched = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == {name for name, _, _ in state_parameters(layer, "ABC-full")}
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


def call(layer: Layer, x: Tensor, **kwargs: Any) -> list[StateSpace]:
    """The states of a call with arguments that the stand-ins' own forward does not take."""
    with record_states(layer) as states:
        for hook in layer._forward_pre_hooks.values():
            hook(layer, (x,), kwargs)
    return states.flat()


@pytest.mark.parametrize("layer", [GatedLinearAttention, RWKV6Attention, RWKV7Attention], indirect=True)
def test_packed_sequences_do_not_see_each_other(layer: Layer) -> None:
    x = torch.randn(1, 7, WIDTH).double()
    (packed,) = call(layer, x, cu_seqlens=torch.tensor([0, 3, 7]))
    apart = [call(layer, part)[0] for part in x.split([3, 4], dim=1)]
    for name in "abc":
        want = torch.cat([getattr(space, name) for space in apart], dim=1)
        torch.testing.assert_close(getattr(packed, name), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [Mamba3OfRanks], indirect=True)
def test_padding_of_mamba3_is_left_out(layer: Layer) -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    (space,) = call(layer, torch.randn(2, TOKENS, WIDTH).double(), attention_mask=mask)
    assert len(space.without_padding().a) == 7


@pytest.mark.parametrize("layer", [GatedLinearAttention], indirect=True)
def test_padding_and_refusals(layer: Layer) -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    x = torch.randn(2, TOKENS, WIDTH).double()

    class Cache:
        def get_seq_length(self) -> int:
            return 3

    (space,) = call(layer, x, attention_mask=mask)
    assert space.without_padding().a.shape == (7, 2, 4)
    with pytest.raises(ConfigError, match="use_cache=False"):
        call(layer, x, past_key_values=Cache())
    with record_states(layer, b_mode="zoh"), pytest.raises(ConfigError, match="b_mode='raw'"):
        layer(x)
