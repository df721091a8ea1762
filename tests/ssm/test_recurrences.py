"""Probes of transformers' other recurrences: the systems recorded in a forward give the layer's own impulse responses.

Each layer runs its own forward while its states are recorded. Then its own recurrence runs on one token repeated, with
a value of one at the first step and zero after it: the outputs are the impulse response of the system that the token
holds fixed. The layers' casts to float32 are taken to be casts to float64 meanwhile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm._torchvision import torchvision
from infssm.errors import ConfigError
from infssm.ssm import StateSpace, find_mixers, record_states, state_parameters

WIDTH, TOKENS, STEPS = 16, 5, 9
Respond = Callable[[int], Tensor]


@contextmanager
def double_precision(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a layer that casts to float32 compute in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module(type(layer).__module__), "torch", Torch())
        patch.setattr(Tensor, "float", lambda tensor: tensor)
        yield


def make(name: str, cls: str, *args: Any, **config: Any) -> tuple[Any, Any]:
    """A random layer in float64, and its module."""
    torchvision()
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    layer = getattr(module, cls)(
        SimpleNamespace(hidden_size=WIDTH, hidden_act="silu", rms_norm_eps=1e-6, **config), *args
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    return layer.double(), module


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The original function, and what it was last called with."""
    original, seen = getattr(owner, name), {}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.update(args=args, kwargs=kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)
    return original, seen


def repeated(x: Tensor, token: int, dim: int = 1) -> Tensor:
    """One token, held for all steps."""
    return x.narrow(dim, token, 1).expand(*x.shape[:dim], STEPS, *x.shape[dim + 1 :]).clone()


def impulse(x: Tensor, dim: int = 1) -> Tensor:
    """A one at the first step: the shape of x with STEPS in dimension dim."""
    value = torch.zeros(*x.shape[:dim], STEPS, *x.shape[dim + 1 :], dtype=x.dtype)
    value.narrow(dim, 0, 1).fill_(1)
    return value


def kimi(name: str, cls: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Any, tuple[Any, ...], Respond]:
    sizes = {"linear_num_heads": 2, "linear_head_dim": 6, "linear_conv_kernel_dim": 3, "layer_types": ["linear"]}
    layer, module = make(name, cls, 0, **sizes, **config)
    rule, seen = spy(monkeypatch, module, "chunk_kimi_delta_attention")

    def respond(token: int) -> Tensor:
        q, k, _ = (repeated(x, token) for x in seen["args"])
        options = seen["kwargs"] | {x: repeated(seen["kwargs"][x], token) for x in ("g", "beta")}
        return rule(q, k, impulse(seen["args"][2]), **options)[0][..., 0]

    return layer, (torch.randn(2, TOKENS, WIDTH).double(),), respond


def recurrent_gemma(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...], Respond]:
    layer, _ = make("recurrent_gemma", "RecurrentGemmaRglru", num_attention_heads=2, lru_width=WIDTH)
    scan, seen = spy(monkeypatch, layer, "_rnn_scan")
    x = torch.randn(2, TOKENS, WIDTH).double()

    def respond(token: int) -> Tensor:
        seen_now = seen["kwargs"]
        gates = repeated(seen_now["recurrent_gate"], token)
        scale = (seen_now["hidden_states"] / x)[:, token : token + 1]  # what the layer multiplies its input with
        reset = repeated(seen_now["reset"], token) & (token > 0)
        gates = gates * ~repeated(seen_now["reset"], token)
        return scan(
            hidden_states=scale * impulse(x),
            recurrent_gate=gates,
            reset=reset,
            recurrent_states=None,
            acc_dtype=torch.float64,
        )[0]

    return layer, (x, torch.arange(TOKENS).expand(2, TOKENS)), respond


class Torch:
    """torch with another float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


def minimax(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...], Respond]:
    sizes = {
        "num_attention_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 3,
        "block_size": 4,
        "layer_types": ["linear"] * 2,
    }
    layer, _ = make("minimax", "MiniMaxLightningAttention", 1, **sizes)
    layer.slope_rate = layer.get_slope_rate().double()
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)  # in float64
    activated: list[Tensor] = []
    act, layer.norm = layer.act_fn, Kept()

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            activated.append(act(x))
            return activated[-1]

    layer.act_fn = Act()
    x = torch.randn(2, TOKENS, WIDTH).double()

    def respond(token: int) -> Tensor:
        q, k, _ = repeated(activated[-1], token).unflatten(-1, (2, -1)).chunk(3, -1)
        held = torch.cat([q, k, impulse(activated[-1]).unflatten(-1, (2, -1)).chunk(3, -1)[2]], -1).flatten(2)
        with monkeypatch.context() as patch:
            patch.setattr(layer.act_fn, "forward", lambda _: held)
            layer(torch.zeros(2, STEPS, WIDTH).double(), None, None)
        return layer.norm.seen.unflatten(-1, (2, -1))[..., 0]

    return layer, (x, None, None), respond


def rwkv4(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...], Respond]:
    """The layer gives the quotient of numerator and normaliser; the normaliser is the sum of the response so far."""
    config = {"attention_hidden_size": WIDTH, "context_length": 64}
    layer, module = make("rwkv", "RwkvSelfAttention", 0, **config)
    attention, seen = spy(monkeypatch, module, "rwkv_linear_attention")

    def respond(token: int) -> Tensor:
        decay, first, key, value = seen["args"]
        quotient, _ = attention(decay, first, repeated(key, token), impulse(value))
        return quotient

    return layer, (torch.randn(2, TOKENS, WIDTH).double(),), respond


def mlstm(mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...], Respond]:
    torchvision()
    transformers = importlib.import_module("transformers")
    module = importlib.import_module("transformers.models.xlstm.modeling_xlstm")
    config = transformers.xLSTMConfig(
        hidden_size=WIDTH, num_heads=2, num_hidden_layers=1, weight_mode=mode, chunk_size=4
    )
    torch.manual_seed(0)
    layer = module.xLSTMLayer(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    _, seen = spy(monkeypatch, layer.mlstm_backend, "forward")

    def respond(token: int) -> Tensor:
        now = {x: seen["kwargs"][x] for x in ("query", "key", "value", "igate", "fgate")}
        held = {x: repeated(y, token, dim=2) for x, y in now.items()} | {"value": impulse(now["value"], dim=2)}
        found = module.mlstm_recurrent_sequence_native(**held, eps=0.0, dtype_state=torch.float64)
        return found[..., 0].transpose(1, 2)

    return layer, (torch.randn(2, TOKENS, WIDTH).double(),), respond


LAYERS: dict[str, Callable[[pytest.MonkeyPatch], tuple[Any, tuple[Any, ...], Respond]]] = {
    "kimi-linear": lambda patch: kimi("kimi_linear", "KimiLinearDeltaAttention", patch),
    "glm5-next": lambda patch: kimi("glm5_next", "Glm5NextTextLinearAttention", patch, linear_lower_bound=-5.0),
    "glm5-next-softplus": lambda patch: kimi(
        "glm5_next", "Glm5NextTextLinearAttention", patch, linear_lower_bound=None
    ),
    "bailing": lambda patch: kimi(
        "bailing_hybrid", "BailingHybridDeltaAttention", patch, kda_safe_gate=True, kda_lower_bound=-5.0
    ),
    "recurrent-gemma": recurrent_gemma,
    "minimax": minimax,
    "rwkv4": rwkv4,
    "mlstm": lambda patch: mlstm("single", patch),
    "mlstm-fused": lambda patch: mlstm("fused", patch),
}


def response(space: StateSpace) -> Tensor:
    """``c A^t b``: [batch, steps, tokens, ...]."""
    A, x, found = space.dense(), space.b, []
    for _ in range(STEPS):
        found.append((space.c * x).sum(-1))
        x = (A @ x.unsqueeze(-1)).squeeze(-1)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", list(LAYERS))
def test_impulse_responses_are_the_layer_s_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call, respond = LAYERS[name](monkeypatch)
    with double_precision(layer, monkeypatch), torch.no_grad():
        with record_states(layer) as states:
            layer(*call)
        (space,) = states.flat()
        found = response(space)
        assert found.abs().max() > 1e-3
        if name in ("rwkv4", "mlstm", "mlstm-fused"):  # what comes out is the quotient of numerator and normaliser
            normaliser = found.cumsum(1)
            found = found / (normaliser if name == "rwkv4" else normaliser.abs().clamp_min(1))
        for token in range(TOKENS):
            torch.testing.assert_close(found[:, :, token], respond(token), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", list(LAYERS))
def test_states_depend_on_the_parameters_that_the_probe_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call, _ = LAYERS[name](monkeypatch)
    assert list(find_mixers(layer)) == [""]
    with record_states(layer) as states:
        layer(*call)
    (space,) = states.flat()
    tensors = [x for x in (space.a, space.c, space.b, space.u, space.v) if x is not None and x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weighted = [(x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in tensors]
    torch.stack(weighted).sum().backward()
    touched = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    rows = state_parameters(layer, "ABC-full")
    assert touched == {name for name, _, _ in rows}
    for _, parameter, part in rows:
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad[slice(None) if part is None else part].abs().sum() > 0


def test_options_of_selective_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call, _ = LAYERS["kimi-linear"](monkeypatch)
    with pytest.raises(ConfigError, match="b_mode='raw'"), record_states(layer, b_mode="zoh"):
        layer(*call)
    with pytest.raises(ConfigError, match="include_dt_bias=True"), record_states(layer, include_dt_bias=False):
        layer(*call)


def test_lfm2_is_refused_with_what_to_use_instead() -> None:
    layer, _ = make("lfm2", "Lfm2ShortConv", 0, conv_L_cache=3, conv_bias=False, layer_types=["conv"])
    with record_states(layer), pytest.raises(ConfigError, match=r"three tokens.*use lwf-f or lwf"):
        layer(torch.randn(1, 4, WIDTH).double())


@pytest.mark.parametrize(("module", "cls"), [("models.ttt", "TTTLinear"), ("xlstm.blocks.slstm.layer", "sLSTMLayer")])
def test_nonlinear_states_are_refused(module: str, cls: str) -> None:
    layer = type(cls, (nn.Linear,), {"__module__": module})(2, 2)
    with record_states(layer), pytest.raises(ConfigError, match=r"nonlinear function of it.*use lwf-f or lwf"):
        layer(torch.ones(1, 2))
