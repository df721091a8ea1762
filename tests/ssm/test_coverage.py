"""What an adapter trains of the state space layers, in words; and the hidden states themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import infssm
from infssm._torchvision import torchvision
from infssm.cli.app import app
from infssm.errors import ConfigError
from infssm.integrations.transformers import accelerated
from infssm.ops import scan, scan_ssd
from infssm.ssm import coverage, record_states
from tests.ssm import hf

torchvision()  # peft imports transformers, which imports it
peft = pytest.importorskip("peft")


def adapted(**options: object) -> torch.nn.Module:
    return peft.get_peft_model(hf.make("mamba"), peft.LoraConfig(r=2, **options))


def test_a_plain_model_is_trained_everywhere() -> None:
    found = coverage(hf.make("bamba"))
    assert not found.missed
    assert not found.has_adapters
    assert (
        found.summary()
        == "1 of 1 state space layers have a trained parameter, 1 one that forms their states (A, B, C)."
    )
    frozen = hf.make("mamba").requires_grad_(False)
    assert coverage(frozen).missed == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]


def test_an_adapter_that_misses_a_layer() -> None:
    model = adapted(target_modules=["x_proj"], layers_to_transform=[1])
    found = coverage(model)
    assert [name.rpartition("layers.")[2] for name in found.missed] == ["0.mixer"]
    layer = next(layer for layer in found.layers.values() if layer.trained)
    assert layer.forms_states
    assert "The adapter misses" in found.summary()
    assert "target_modules=['in_proj', 'x_proj']" in found.summary()
    with pytest.warns(UserWarning, match="1 of 2 state space layers have a trained parameter"):
        infssm.attach(model, "inf-ssm-exact")


def test_adapters_beside_the_states_and_without_effect() -> None:
    found = coverage(adapted(target_modules=["in_proj", "dt_proj"]))
    assert all(layer.ignored == ["dt_proj"] for layer in found.layers.values())
    assert "have no effect" in found.summary()


def test_doctor_reads_the_folder_of_an_adapter(tmp_path: Path) -> None:
    base = hf.make("mamba")
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["in_proj"], layers_to_transform=[0]))
    model.save_pretrained(tmp_path / "adapter")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "adapter"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["summary"].startswith("1 of 2 state space layers have a trained parameter")
    assert len(found["missed"]) == 1
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path / "base")])
    assert "2 of 2 state space layers" in shown.stdout
    assert "backbone.layers.0.mixer" in shown.stdout
    missing = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
    assert isinstance(missing.exception, ConfigError)


@pytest.mark.parametrize("name", ["vim_nano", "mamba2_nano", "mamba", "mamba2", "bamba"])
def test_hidden_states_give_the_layer_s_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if name == "vim_nano":
        model, x = infssm.create_model("vim_nano", num_classes=3, depth=2), torch.randn(2, 3, 32, 32)
    elif name == "mamba2_nano":
        model = infssm.create_model(name, num_classes=3, n_layer=2, ngroups=2)
        x = torch.randint(256, (2, 9))
    else:
        model, x = hf.make(name), hf.tokens()
    scans: list = []
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("infssm.ssm.taps.hidden_states", _spy(scans))
        with _nothing() if name.endswith("nano") else accelerated(model), record_states(model, h=True) as states:
            for _ in range(2):  # the second forward replaces the first
                scans.clear()
                model(x)
    found = [h for layer in states.h.values() for h in layer]
    assert len(found) == len(states.flat()) == len(scans)
    for h, inputs in zip(found, scans, strict=True):
        assert h.shape == (*inputs.u.shape, inputs.B.shape[-1])
        plain = inputs._replace(D=None, z=None)
        groups = inputs.C.unsqueeze(2) if inputs.C.ndim == 3 else inputs.C
        expected = (h * groups.repeat_interleave(h.shape[2] // groups.shape[2], dim=2)).sum(-1)
        y = scan_ssd(plain).y if inputs.A.ndim == 1 else scan(plain).y
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def _spy(scans: list):
    from infssm.ssm.hidden import hidden_states

    def spied(inputs):
        scans.append(inputs)
        return hidden_states(inputs)

    return spied


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def test_hidden_states_of_other_layers_are_refused() -> None:
    model = hf.make("mamba")
    with (
        pytest.raises(ConfigError, match=r"h=True needs selective or Mamba-2 layers .*accelerate\(model\)"),
        record_states(model, h=True),
    ):
        pass
    with record_states(model) as states:
        pass
    with pytest.raises(ConfigError, match="record_states\\(model, h=True\\)"):
        _ = states.h
