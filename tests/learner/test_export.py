"""Exported models give the answers of the models they came from."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from typer.testing import CliRunner

import infssm
from infssm.bench.running import run
from infssm.cli.app import app
from infssm.errors import ConfigError
from infssm.learner.convolutions import with_fixed_convolutions
from infssm.learner.export import TOLERANCE, export_model
from infssm.models.s4d import S4DMixer
from tests.learner.tiny import tiny_config
from tests.models.small import SMALL


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba_130m", {"n_layer": 1}),
        ("vim_nano", {"depth": 1}),
        ("s4d_nano", {"n_layer": 2}),
        ("s4d_nano", {"n_layer": 1, "discretization": "bilinear", "prenorm": True}),
    ],
)
def test_onnx_file_gives_the_logits_of_the_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = SMALL[name].build(name, **options).eval()
    assert export_model(model, SMALL[name].make_input(), tmp_path / "model.onnx") < TOLERANCE


def test_a_long_s4d_as_convolutions_is_the_model() -> None:
    """In float64 against the Fourier transform: the same sums of 300 products, in another order."""
    model = infssm.create_model("s4d_nano", n_layer=2, num_classes=3).eval().double()
    x = torch.randn(2, 300, 1, dtype=torch.float64)
    fixed = with_fixed_convolutions(model, x)
    assert not any(isinstance(module, S4DMixer) for module in fixed.modules())
    assert any(isinstance(module, S4DMixer) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(fixed(x), model(x), rtol=1e-10, atol=1e-10)
    plain = torch.nn.Linear(2, 2)
    assert with_fixed_convolutions(plain, torch.randn(2, 2)) is plain


class Wordless(torch.nn.Module):
    """A model that ONNX has no words for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.polygamma(2, x.abs() + 1)


def test_what_onnx_cannot_say_is_refused_and_a_torch_program_can(tmp_path: Path) -> None:
    example = torch.rand(2, 3)
    with pytest.raises(ConfigError, match="cannot be written as ONNX"):
        export_model(Wordless(), example, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    assert export_model(Wordless(), example, tmp_path / "model.pt2", "torch") < TOLERANCE
    s4d = SMALL["s4d_nano"]
    assert export_model(s4d.build("s4d_nano", n_layer=1).eval(), s4d.make_input(), tmp_path / "s4d.pt2", "torch") < 1e-4


@pytest.mark.parametrize("head", ["ncm", "gda"])
def test_run_as_onnx_and_as_torch_program(head: str, tmp_path: Path) -> None:
    path = run(tiny_config(tmp_path / "runs", head), quiet=True).path
    target = tmp_path / "model.onnx"
    done = CliRunner().invoke(app, ["export", str(path), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert f"wrote {target}" in done.output
    stored = {entry.key: entry.value for entry in onnx.load(target).metadata_props}
    classifier = infssm.load(path)
    assert tuple(json.loads(stored["classes"])) == classifier.classes
    again = CliRunner().invoke(app, ["export", str(path), "-o", str(target)])
    assert isinstance(again.exception, ConfigError)
    done = CliRunner().invoke(app, ["export", str(path), "--to", "torch", "-o", str(tmp_path / "model.pt2")])
    assert done.exit_code == 0, done.output
    x = torch.randn(3, 1, 8, 8)
    found = torch.export.load(tmp_path / "model.pt2").module()(x)
    torch.testing.assert_close(found[:, : len(classifier.classes)], classifier.logits(x), rtol=1e-4, atol=1e-4)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        export_model(torch.nn.Linear(2, 2), torch.randn(2, 2), tmp_path / "none" / "model.onnx")
