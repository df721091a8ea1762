"""transformers' layers on our scan: same outputs, gradients, caches and states; swapped in and out without a trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError, NoSSMLayersError
from infssm.integrations.transformers import accelerate, accelerated, restore
from infssm.ssm import OldModel, record_states, state_parameters
from infssm.ssm import accelerate as _fast
from tests.compare import assert_rounding
from tests.ssm import hf

FAMILIES = [family for family in hf.FAMILIES if family != "zamba"]


def inputs() -> dict[str, Tensor]:
    x = hf.tokens()
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    return {"input_ids": x, "attention_mask": mask}


def step(model: nn.Module, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**inputs(), **kwargs).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_the_same(family: str) -> None:
    model = hf.make(family).train()
    logits, gradients = step(model, use_cache=False)
    keys = list(model.state_dict())
    assert accelerate(model) is model
    assert any(isinstance(module, _fast.Fast) for module in model.modules())
    fast_logits, fast_gradients = step(model, use_cache=False)
    torch.testing.assert_close(fast_logits, logits, rtol=1e-4, atol=1e-4)
    assert list(fast_gradients) == list(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-3, atol=1e-3)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("family", FAMILIES)
def test_the_original_slow_scan_is_not_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate(hf.make(family))
    with hf.captured_scans(model, monkeypatch) as calls:
        model(**inputs(), use_cache=False)
    assert calls == []
    restore(model)
    with hf.captured_scans(model, monkeypatch) as calls:
        model(**inputs(), use_cache=False)
    assert calls


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_fill_the_cache_and_generation_goes_on_from_it(family: str) -> None:
    model = hf.make(family).eval()
    x = hf.tokens()

    def prompt_and_step() -> tuple[Tensor, Tensor]:
        first = model(input_ids=x, use_cache=True)
        cache = getattr(first, "cache_params", None) or first.past_key_values
        name = "cache_params" if hasattr(first, "cache_params") else "past_key_values"
        second = model(input_ids=x[:, :1], use_cache=True, **{name: cache})
        return first.logits, second.logits

    with torch.no_grad():
        expected = prompt_and_step()
        with accelerated(model):
            got = prompt_and_step()
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("include_dt_bias", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_probe(family: str, include_dt_bias: bool, use_cache: bool) -> None:
    model = hf.make(family).eval()
    with record_states(model, include_dt_bias=include_dt_bias, b_mode="zoh") as expected:
        model(**inputs(), use_cache=False)
    rows = [(name, part) for name, _, part in state_parameters(model, "ABC-direct")]
    accelerate(model)
    with record_states(model, include_dt_bias=include_dt_bias, b_mode="zoh") as states:
        model(**inputs(), use_cache=use_cache)
    assert list(states) == list(expected)
    old = OldModel(model, include_dt_bias=include_dt_bias, b_mode="zoh").states(inputs())
    for got, frozen, want in zip(states.flat(), old, expected.flat(), strict=True):
        for g, f, w in zip(
            (got.a, got.c, got.b), (frozen.a, frozen.c, frozen.b), (want.a, want.c, want.b), strict=True
        ):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-5)
            assert g.requires_grad
            assert not f.requires_grad
    assert [(name, part) for name, _, part in state_parameters(model, "ABC-direct")] == rows


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_gradient_checkpointing_of_transformers(family: str) -> None:
    model = hf.make(family).train()
    with record_states(model) as states:
        _, expected = step(model, use_cache=False)
    wanted = states.flat()
    accelerate(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with record_states(model) as states:
        _, gradients = step(model, use_cache=False)
    for got, want in zip(states.flat(), wanted, strict=True):
        torch.testing.assert_close(got.a, want.a)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_accelerated_models_can_be_copied(clone: Any) -> None:
    model = accelerate(hf.make("falcon-mamba"))
    twin = clone(model)
    assert_rounding(twin(**inputs(), use_cache=False).logits, model(**inputs(), use_cache=False).logits)
    assert type(twin.backbone.layers[0].mixer) is type(model.backbone.layers[0].mixer)


def test_restore_leaves_no_trace() -> None:
    model = hf.make("mamba")
    original = type(model.backbone.layers[0].mixer)
    with accelerated(model):
        accelerate(model)  # twice is once
        assert type(model.backbone.layers[0].mixer) is not original
    assert type(model.backbone.layers[0].mixer) is original


def test_half_precision_models_stay_half() -> None:
    model = hf.make("mamba").bfloat16()
    expected = model(**inputs(), use_cache=False).logits
    logits = accelerate(model)(**inputs(), use_cache=False).logits
    assert logits.dtype == expected.dtype
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.1)


def test_a_users_own_subclass_is_left_alone() -> None:
    model = hf.make("mamba")
    mixer = model.backbone.layers[0].mixer
    mixer.__class__ = type("MambaMixer", (type(mixer),), {})
    accelerate(model)
    assert not isinstance(mixer, _fast.Fast)
    assert isinstance(model.backbone.layers[1].mixer, _fast.Fast)


def test_nothing_to_accelerate() -> None:
    for model in (nn.Linear(2, 2), hf.make("zamba")):
        with pytest.raises(NoSSMLayersError, match=r"known: .*MambaVisionMixer.* MambaMixer"):
            accelerate(model)


def test_recording_while_generating_is_refused() -> None:
    model = accelerate(hf.make("mamba").eval())
    with torch.no_grad():
        cache = model(input_ids=hf.tokens(), use_cache=True).cache_params
        with record_states(model), pytest.raises(ConfigError, match="use_cache=False"):
            model(input_ids=hf.tokens()[:, :1], cache_params=cache, use_cache=True)


def test_unknown_names_are_not_invented() -> None:
    with pytest.raises(AttributeError):
        _ = _fast.FastNothing
