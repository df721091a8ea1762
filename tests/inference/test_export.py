"""Exported models give the answers of the models they came from."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from typer.testing import CliRunner

import infssm
from infssm.cli.app import app
from infssm.errors import ConfigError
from infssm.inference import export_model
from infssm.inference.export import TOLERANCE
from infssm.train import run
from tests.models.small import SMALL
from tests.train.tiny import tiny_config


def test_onnx_file_of_a_sequence_model_gives_its_logits(tmp_path: Path) -> None:
    model = SMALL["mamba_130m"].build("mamba_130m", n_layer=1).eval()
    assert export_model(model, SMALL["mamba_130m"].make_input(), tmp_path / "model.onnx") < TOLERANCE


def test_fourier_transforms_are_no_onnx_but_a_torch_program(tmp_path: Path) -> None:
    model = SMALL["s4d_nano"].build("s4d_nano", n_layer=1).eval()
    example = SMALL["s4d_nano"].make_input()
    with pytest.raises(ConfigError, match="cannot be written as ONNX"):
        export_model(model, example, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    assert export_model(model, example, tmp_path / "model.pt2", "torch") < TOLERANCE


def test_run_as_onnx_and_as_torch_program(tmp_path: Path) -> None:
    path = run(tiny_config(tmp_path / "runs", "ncm"), quiet=True).path
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
