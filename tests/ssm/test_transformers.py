"""Every transformers family: the probe's states are those of the model's own slow path, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infssm.ssm import OldModel, StateSpace, find_mixers, record_states, state_parameters
from tests.compare import assert_rounding
from tests.ssm import hf

FAMILIES = list(hf.FAMILIES)


def reference(call: dict[str, Tensor], b_mode: str) -> StateSpace:
    """States by their definition, from what the slow path gave its scan."""
    delta, A, B, C = call["delta"], call["A"], call["B"], call["C"]
    groups = B.shape[2] if B.ndim == 4 else 1
    B, C = (v.reshape(*v.shape[:2], groups, -1) for v in (B, C))

    def mean(per_channel: Tensor) -> Tensor:
        return per_channel.unflatten(2, (groups, -1)).mean(3)

    abar = torch.exp(delta[..., None] * A)
    factor = {
        "raw": torch.ones(()),
        "euler": mean(delta[..., None]),
        "zoh": mean((abar - 1) / A),
    }[b_mode]
    space = StateSpace(mean(abar), C, B * factor)
    return space.map(lambda v: v.squeeze(2)) if groups == 1 else space


def reference_states(
    model: Any, monkeypatch: pytest.MonkeyPatch, b_mode: str, **inputs: Any
) -> tuple[list[StateSpace], Tensor]:
    with hf.captured_scans(model, monkeypatch) as calls:
        logits = model(**inputs, use_cache=False).logits
    states = [reference(call, b_mode) for call in calls]
    heads = getattr(model.config, "n_mamba_heads", 1) if model.config.model_type == "zamba" else 1
    if heads > 1:  # one scan per head: the probe has them as groups
        states = [
            StateSpace(*(torch.stack([getattr(s, k) for s in states[i : i + heads]], dim=2) for k in ("a", "c", "b")))
            for i in range(0, len(states), heads)
        ]
    return states, logits


def weighted_sum(states: list[StateSpace]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tensors = [t for s in states for t in (s.a, s.c, s.b) if t is not None]
    return torch.stack([(t * torch.randn(t.shape, generator=generator)).sum() for t in tensors]).sum()


@pytest.mark.parametrize("b_mode", ["raw", "euler", "zoh"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_equal_the_slow_path(family: str, b_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.make(family)
    x = hf.tokens()
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    inputs = {"input_ids": x, "attention_mask": mask}
    expected, logits = reference_states(model, monkeypatch, b_mode, **inputs)
    with record_states(model, b_mode=b_mode) as states:
        recorded_logits = model(**inputs, use_cache=False).logits
    assert_rounding(recorded_logits, logits)
    assert len(states.flat()) == len(expected) > 0
    for got, want in zip(states.flat(), expected, strict=True):
        for g, w in zip((got.a, got.c, got.b), (want.a, want.c, want.b), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(weighted_sum(expected), list(parameters.values()), allow_unused=True)
    gradients = torch.autograd.grad(weighted_sum(states.flat()), list(parameters.values()), allow_unused=True)
    for name, g, w in zip(parameters, gradients, wanted, strict=True):
        assert (g is None) == (w is None), name
        if g is not None and w is not None:
            torch.testing.assert_close(g, w, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_parameters_are_those_with_gradients(family: str) -> None:
    """With the mixers' inputs held fixed, the states depend on the parameters of ABC-full, and on nothing else."""
    model = hf.make(family)
    mixers = find_mixers(model)
    rows = state_parameters(model, "ABC-full")
    sizes = [
        sum(p[part if part is not None else slice(None)].numel() for _, p, part in state_parameters(model, which))
        for which in ("AC-direct", "ABC-direct", "ABC-full")
    ]
    assert sizes[0] <= sizes[1] <= sizes[2]
    assert sizes[0] < sizes[2]
    handles = [m.register_forward_pre_hook(_detach_input, with_kwargs=True, prepend=True) for m in mixers.values()]
    with record_states(model) as states:
        model(input_ids=hf.tokens(), use_cache=False)
    for handle in handles:
        handle.remove()
    weighted_sum(states.flat()).backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == {name for name, _, _ in rows}
    for name, parameter, part in rows:
        assert parameter.grad is not None
        assert (parameter.grad[part if part is not None else slice(None)] != 0).any(), name


def _detach_input(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    detached = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return tuple(v.detach() if isinstance(v, Tensor) else v for v in args), detached


@pytest.mark.parametrize("family", FAMILIES)
def test_old_model_gives_the_same_states_and_stops_early(family: str) -> None:
    model = hf.make(family)
    x = hf.tokens()
    with record_states(model, include_dt_bias=False) as states, torch.no_grad():
        model.eval()(input_ids=x, use_cache=False)
    old = OldModel(model, include_dt_bias=False)
    calls: list[str] = []
    for name, module in old.module.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    for got, want in zip(old.states({"input_ids": x}), states.flat(), strict=True):
        assert_rounding(got.a, want.a)  # frozen weights may take another matrix product
        assert_rounding(got.c, want.c)
        assert not got.a.requires_grad
    last = list(states)[-1]
    assert calls
    assert not any(name.startswith(("lm_head", f"{last}.out_proj")) for name in calls)


def test_recording_while_generating_from_a_cache_is_refused() -> None:
    from infssm.errors import ConfigError

    model = hf.make("mamba").eval()
    with torch.no_grad():
        cache = model(input_ids=hf.tokens(), use_cache=True).cache_params
        with record_states(model), pytest.raises(ConfigError, match="use_cache=False"):
            model(input_ids=hf.tokens()[:, :1], cache_params=cache, use_cache=True)


def test_fresh_cache_changes_nothing() -> None:
    model = hf.make("mamba2").eval()
    with torch.no_grad():
        with record_states(model) as cached:
            model(input_ids=hf.tokens(), use_cache=True)
        with record_states(model) as plain:
            model(input_ids=hf.tokens(), use_cache=False)
    for a, b in zip(cached.flat(), plain.flat(), strict=True):
        assert_rounding(a.a, b.a)
