"""Finding mixers, naming them, teaching new ones, and the parameter sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm import _registry
from infssm.errors import ConfigError, NoSSMLayersError
from infssm.models import create_model
from infssm.ops import mean_states
from infssm.ssm import (
    MixerInputs,
    OldModel,
    Probe,
    StateSpace,
    find_mixers,
    record_states,
    register_probe,
    state_parameters,
)
from infssm.ssm import probe as registry
from tests.compare import identical


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PROBES", dict(registry._PROBES))


def vim() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vim_nano", num_classes=5, img_size=8, patch_size=4, depth=3, embed_dim=16)


class Decay(nn.Module):
    """A layer nobody knows: one leaky average per channel."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(width, 1))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return self.out(x * gain).cumsum(1)


class Slow(Decay):
    """A subclass: found through its base."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Decay(), Slow()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x), gain=2.0))


def decay_probe(mixer: Decay, inputs: MixerInputs) -> list[StateSpace]:
    (x,) = inputs
    assert len(inputs) == 1
    means = mean_states(x * inputs.kwargs.get("gain", 1.0), -mixer.rate, delta_softplus=True)
    return [StateSpace(means.a, mixer.out(inputs[0]).mean(-1, keepdim=True))]


def test_a_model_without_known_layers_lists_what_was_seen_and_the_way_out() -> None:
    with pytest.raises(NoSSMLayersError) as error:
        find_mixers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Decay()))
    text = str(error.value)
    assert "torch.nn.modules.linear.Linear x3" in text
    assert "test_mixers.Decay" in text
    assert "register_probe" in text


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("by", ["class", "name", "pattern"])
def test_a_registered_layer_and_its_subclasses_are_recorded(by: str) -> None:
    key: Any = {"class": Decay, "name": f"{__name__}.Decay", "pattern": "*test_mixers.Decay"}[by]
    assert register_probe(key)(decay_probe) is decay_probe
    register_probe(key)(decay_probe)  # the same cell run twice
    with pytest.raises(ConfigError, match="registered already"):
        register_probe(key)(lambda *_: [])
    model = Net()
    x = torch.randn(2, 3, 4)
    with record_states(model) as states:
        model(x)
    assert list(states) == ["first", "second"]
    hidden = model.first(x)
    expected = torch.exp(-torch.nn.functional.softplus(2.0 * hidden)[..., None] * model.second.rate).mean(2)
    torch.testing.assert_close(states["second"][0].a, expected)
    states["second"][0].a.sum().backward()
    assert model.second.rate.grad is not None
    assert model.first.out.weight.grad is not None
    with pytest.raises(ConfigError, match="parameters="):
        state_parameters(model, "AC-direct")


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("whole", [True, False])
def test_installed_packages_add_probes(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    rows = [("rate", None)]
    loaded = Probe(decay_probe, lambda mixer, _: [(mixer.rate, None)]) if whole else decay_probe
    point = SimpleNamespace(name=f"{__name__}.Decay", load=lambda: loaded)
    monkeypatch.setattr(_registry, "entry_points", lambda group: [point] if group == "infssm.probes" else [])
    model = Net()
    assert list(find_mixers(model)) == ["first", "second"]
    if whole:
        got = [(name, part) for name, _, part in state_parameters(model, "AC-direct")]
        assert got == [(f"{prefix}.{name}", part) for prefix in ("first", "second") for name, part in rows]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2]),
        (1, [2]),
        (2, [1, 2]),
        (["layers.1.mixer"], [1]),
        (("layers.2.mixer", "layers.0.mixer"), [0, 2]),
        ("layers.0.mixer", [0]),
    ],
)
def test_layers_are_chosen(layers: Any, expected: list[int]) -> None:
    assert list(find_mixers(vim(), layers)) == [f"layers.{i}.mixer" for i in expected]


@pytest.mark.parametrize(
    ("layers", "message"),
    [(0, "use 1 to 3"), (4, "use 1 to 3"), (["layers.1.mixr"], "did you mean 'layers.1.mixer'"), ([], "empty")],
)
def test_impossible_choices_say_what_is_possible(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_mixers(vim(), layers)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'raw', 'euler' or 'zoh'"), record_states(vim(), b_mode="exact"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigError, match="AC-direct"):
        state_parameters(vim(), "AC")


def test_parameter_sets_of_our_models_grow() -> None:
    model = vim()
    parameters = dict(model.named_parameters())
    sizes = []
    for which in ("AC-direct", "ABC-direct", "ABC-full"):
        rows = state_parameters(model, which)
        assert all(parameters[name] is parameter for name, parameter, _ in rows)
        sizes.append(sum(p[part if part is not None else slice(None)].numel() for _, p, part in rows))
    assert sizes[0] < sizes[1] < sizes[2] < sum(p.numel() for p in parameters.values())


class TestOldModel:
    def test_is_a_frozen_copy_that_runs_states_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from infssm.models import mamba, mixer

        model = vim().train()
        x = torch.randn(2, 3, 8, 8)
        with record_states(model, b_mode="zoh") as states:
            model(x)
        old = OldModel(model, b_mode="zoh")
        scans, heads = [], []
        run = mixer.scan
        monkeypatch.setattr(mixer, "scan", lambda *args, **kwargs: scans.append(1) or run(*args, **kwargs))
        together = mamba.scan_directions  # several scans in one call
        monkeypatch.setattr(
            *(mamba, "scan_directions"),
            lambda xz, weights, reverse, **kwargs: scans.extend(reverse) or together(xz, weights, reverse, **kwargs),
        )
        old.module.head.register_forward_hook(lambda *_: heads.append(1))
        for got, want in zip(old.states(x), states.flat(), strict=True):
            for g, w in zip((got.a, got.c, got.b), (want.a, want.c, want.b), strict=True):
                torch.testing.assert_close(g, w)
                assert not g.requires_grad
        assert len(scans) == 2 * 2  # two directions of every block but the last
        assert heads == []
        assert not any(p.requires_grad for p in old.module.parameters())
        assert not old.module.training
        assert model.training

    def test_does_not_follow_the_new_model_and_is_not_part_of_it(self) -> None:
        model = vim()
        keys = set(model.state_dict())
        model.old = OldModel(model)  # type: ignore[assignment]
        assert set(model.state_dict()) == keys
        x = torch.randn(1, 3, 8, 8)
        before = model.old.states(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        for a, b in zip(model.old.states(x), before, strict=True):
            assert identical(a.a, b.a)

    def test_only_the_named_layers_run(self) -> None:
        old = OldModel(vim(), layers=["layers.1.mixer"])
        calls = []
        for i, block in enumerate(old.module.layers):
            block.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
        assert len(old.states(torch.randn(1, 3, 8, 8))) == 2
        assert calls == [0, 1]

    def test_resumes(self) -> None:
        model = vim()
        old, other = OldModel(model), OldModel(create_like(model))
        x = torch.randn(1, 3, 8, 8)
        other.load_state_dict(old.state_dict())
        assert identical(other.to("cpu").states(x)[0].a, old.states(x)[0].a)

    def test_states_can_be_used_in_the_new_models_graph(self) -> None:
        model = vim()
        old = OldModel(model)
        x = torch.randn(1, 3, 8, 8)
        with record_states(model) as states:
            model(x)
            targets = old.states(x)  # another model: no nested recording
        loss = sum(((s.a - t.a - 1) * t.c * s.c).sum() for s, t in zip(states.flat(), targets, strict=True))
        loss.backward()
        assert model.layers[0].mixer.A_log.grad is not None

    def test_errors_inside_the_model_come_out(self) -> None:
        old = OldModel(vim())
        with pytest.raises(RuntimeError):
            old.states(torch.randn(1, 5, 8, 8))
        assert old.states(torch.randn(1, 3, 8, 8))


def create_like(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return create_model("vim_nano", num_classes=5, img_size=8, patch_size=4, depth=3, embed_dim=16)
