"""Exported models give the answers of the models they came from, from raw input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import infssm
from infssm import Learner
from infssm.bench.running import run
from infssm.cli.app import app
from infssm.data.audio import log_energies, mel_bank
from infssm.data.facts import LogEnergies
from infssm.data.recipes import deit_recipe
from infssm.errors import ConfigError, InfssmError
from infssm.learner.export import TOLERANCE, check_export, export_classifier, export_model, with_recurrent_s4d
from infssm.learner.predict import TrainedClassifier
from infssm.models.s4d import S4DMixer
from tests.learner.frozen import digits, frozen
from tests.learner.sequences import config, series_file, sound_folder
from tests.learner.taught import digit_files
from tests.learner.tiny import tiny_config
from tests.models.small import SMALL


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba2_130m", {"n_layer": 1, "d_state": 96}),
        ("s4d_nano", {"n_layer": 1, "discretization": "bilinear", "prenorm": True}),
    ],
)
def test_a_sequence_model_is_exported_for_any_length(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = SMALL[name].build(name, **options).eval()
    example = SMALL[name].make_input()
    target = tmp_path / "model.onnx"
    assert export_model(model, example, target, name="x", any_length=True) < TOLERANCE
    longer = torch.cat([example, example.flip(1), example], dim=1)
    found = onnxruntime.InferenceSession(target).run(None, {"x": longer.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(longer), rtol=1e-4, atol=1e-4)


def test_a_recurrent_s4d_is_the_model() -> None:
    """In float64 against the Fourier transform."""
    model = infssm.create_model("s4d_nano", n_layer=2, num_classes=3).eval().double()
    x = torch.randn(2, 70, 1, dtype=torch.float64)
    recurrent = with_recurrent_s4d(model)
    assert not any(isinstance(module, S4DMixer) for module in recurrent.modules())
    assert any(isinstance(module, S4DMixer) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(recurrent(x), model(x), rtol=1e-9, atol=1e-9)
    plain = torch.nn.Linear(2, 2)
    assert with_recurrent_s4d(plain) is plain


def test_log_energies_by_convolution_are_those_by_fourier_transform() -> None:
    sound = torch.randn(2, 1234) * torch.tensor([[1.0], [0.01]])
    bank = mel_bank(8, 8000)
    found = LogEnergies(8, 8000)(sound)
    expected = torch.stack([log_energies(row, 8000, bank) for row in sound])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
    model = s4d.build("s4d_nano", n_layer=1).eval()
    assert export_model(model, s4d.make_input(), tmp_path / "s4d.pt2", "torch", any_length=True) < 1e-4


class NearestPoint(torch.nn.Module):
    """The head of docs/guide/extend.md."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(features, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_a_head_of_distances_is_exported_for_any_number_of_samples(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    assert export_model(NearestPoint(), torch.rand(2, 2), target) < TOLERANCE
    x = torch.rand(40, 2)  # torch.cdist takes another way above 25 rows
    found = onnxruntime.InferenceSession(target).run(None, {"image": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), NearestPoint()(x), rtol=1e-4, atol=1e-4)


def _use(target: Path, classifier: TrainedClassifier, **files: str) -> str:
    """Run the lines that the file itself says it is used by, without infssm."""
    session = onnxruntime.InferenceSession(target)
    stored = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(stored["classes"])) == classifier.classes
    text = f"import sys; sys.modules['infssm'] = None\n{stored['usage']}"
    for placeholder, file in files.items():
        text = text.replace(placeholder.replace("_", "."), file)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=target.parent, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # onnxruntime warns of constants that are not used
    return done.stdout.strip()


def test_an_exported_run_classifies_raw_images(tmp_path: Path) -> None:
    """Images of another size than the training data's, resized and normalised by the file itself.

    After the first of two tasks, so that classes the model has not learnt must be left out.
    """
    path = run(tiny_config(tmp_path / "runs"), quiet=True).path
    target, photo = tmp_path / "model.onnx", tmp_path / "own.png"
    pixels = np.random.default_rng(0).integers(0, 256, (21, 30, 3), np.uint8)
    Image.fromarray(pixels).save(photo)
    arguments = ["export", str(path), "--task", "0", "-o", str(target), "--check", str(photo)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"wrote {target}" in done.output
    assert "own.png: equal to `infssm predict`" in done.output
    assert "tracing the model" in done.output
    assert "session.run" in done.output
    classifier = infssm.load(path, task=0)
    assert _use(target, classifier, photo_jpg="own.png") == classifier.predict(photo).label
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)


def test_a_run_with_a_fitted_head_as_a_torch_program(tmp_path: Path) -> None:
    path = run(tiny_config(tmp_path / "runs", "gda"), quiet=True).path
    target = tmp_path / "model.pt2"
    done = CliRunner().invoke(app, ["export", str(path), "--to", "torch", "-o", str(target)])
    assert done.exit_code == 0, done.output
    classifier, raw = infssm.load(path), torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
    assert classifier.recipe is not None
    expected = classifier.logits(classifier.recipe.eval(raw))
    torch.testing.assert_close(torch.export.load(target).module()(raw), expected, rtol=1e-4, atol=1e-4)


class Sum(torch.nn.Module):
    """Logits that show every pixel, without the time that a scan takes to trace."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(channels * size * size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))


def test_images_are_resized_as_the_recipe_does(tmp_path: Path) -> None:
    """Arrays that are resized as a batch, and timm's transform of single images."""
    from infssm.data import ImageFacts
    from infssm.data.recipes import IMAGENET, LightRecipe

    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((20, 14), (37, 12), (60, 41))]
    arrays = TrainedClassifier(
        Sum(3, 12), ("a", "b"), ImageFacts("own", 3, 20, 14), LightRecipe(size=12, stats=IMAGENET)
    )
    single = TrainedClassifier(Sum(3, 24), ("a", "b"), ImageFacts("own", 3), deit_recipe(size=24))
    for i, classifier in enumerate((arrays, single)):
        target = tmp_path / f"{i}.onnx"
        assert export_classifier(classifier, target) < 1e-2  # a pixel may round to its neighbour
        assert check_export(classifier, target, images) < 1e-2
    with pytest.raises(InfssmError, match="off by"):
        check_export(TrainedClassifier(Sum(3, 24), ("a", "b"), single.samples, single.recipe), target, images)


def test_an_exported_run_classifies_wav_files(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path)
    path = run(config(f"domains:{folder}", tmp_path / "runs", data={"bands": 8}), quiet=True).path
    classifier, target = infssm.load(path), tmp_path / "model.onnx"
    export_classifier(classifier, target)
    sounds = sorted(folder.rglob("9.wav"))
    assert check_export(classifier, target, sounds) < 1e-3
    assert _use(target, classifier, sound_wav=str(sounds[0])) == classifier.predict(sounds[0]).label


def test_an_exported_run_classifies_series(tmp_path: Path) -> None:
    path = run(config(str(series_file(tmp_path)), tmp_path / "runs"), quiet=True).path
    classifier, target = infssm.load(path), tmp_path / "model.onnx"
    export_classifier(classifier, target)
    np.save(tmp_path / "series.npy", np.random.default_rng(0).normal(size=(31, 3)))
    assert check_export(classifier, target, [tmp_path / "series.npy"]) < TOLERANCE
    assert _use(target, classifier) == classifier.predict(tmp_path / "series.npy").label


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        export_model(torch.nn.Linear(2, 2), torch.randn(2, 2), tmp_path / "none" / "model.onnx")


@pytest.mark.parametrize("method", ["frozen+gda", "frozen+mda", "frozen+ncm"])
def test_an_exported_learner_says_what_it_predicts(method: str, tmp_path: Path) -> None:
    """Calibrated probabilities and unknown samples, by distances of the scores (gda) and by others (ncm)."""
    frozen(method, folder=tmp_path / "mine").learn(*digits(0, 1, 2, 3, 4, count=40))
    target, folder = tmp_path / "model.onnx", digit_files(tmp_path / "photos", classes=7, count=4)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "mine"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    files = sorted(folder.rglob("*.png"))
    expected = Learner.load(tmp_path / "mine").predict(list(files))
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    logits, probabilities, known = onnxruntime.InferenceSession(target).run(None, {"image": images})
    names = sorted(expected[0].probabilities)
    for row, prediction in zip(probabilities, expected, strict=True):
        assert dict(zip(names, row, strict=True)) == pytest.approx(prediction.probabilities, abs=1e-3)
    assert known.tolist() == [prediction.known for prediction in expected]
    assert {True, False} == set(known.tolist())
    assert logits.argmax(1).tolist() == probabilities.argmax(1).tolist()
    said = _use(target, Learner.load(tmp_path / "mine").classifier, photo_jpg=str(files[0]))
    assert said.split()[:2] == expected[0].label.split()
    assert said.endswith("known" if expected[0].known else "unknown")
