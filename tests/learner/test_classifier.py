"""A run as a classifier: the same answers as its evaluation, from files, images, arrays and tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from typer.testing import CliRunner

import infssm
from infssm.bench.running import run
from infssm.cli.app import app
from infssm.data import ImageFacts, Split, load_dataset
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import load_config
from infssm.learner.evaluate import evaluate_run
from infssm.learner.setup import build, load_weights
from infssm.learner.store.directory import RunDirectory
from tests.compare import identical
from tests.learner.tiny import tiny_config


@pytest.fixture(scope="module", params=["seq", "ncm", "lucir", "er+inf-ssm-exact+cosine"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, fitted and replaced classifiers."""
    return run(tiny_config(tmp_path_factory.mktemp("runs"), request.param), quiet=True).path


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_once(tmp_path: Path, orientation: int) -> None:
    """By path as by image: the data set's reader turns it, and its EXIF data still name the orientation."""
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "photo.png")))
    facts = ImageFacts("photos", 3)
    for photo in (tmp_path / "photo.png", Image.open(tmp_path / "photo.png"), upright):
        assert np.array_equal(np.asarray(facts.open(photo)), upright)


def test_predictions_are_those_of_the_evaluation(trained: Path) -> None:
    classifier = infssm.load(trained)
    split = json.loads((trained / "split.json").read_text())
    dataset = load_dataset("digits")
    names = json.loads((trained / "stream.json").read_text())["classes"]
    right, images = [0, 0], [0, 0]
    for accuracy, task in zip(evaluate_run(trained), range(2), strict=True):
        chosen = [i for i in split["test"] if names.index(dataset.classes[dataset.labels[i]]) * 2 // len(names) == task]
        pixels = [dataset.images.pixels[i, 0].numpy() for i in chosen]
        found = classifier.predict(list(pixels))
        right[task] = sum(p.label == dataset.classes[dataset.labels[i]] for p, i in zip(found, chosen, strict=True))
        images[task] = len(chosen)
        assert accuracy.images == images[task]
        assert accuracy.class_incremental == right[task] / images[task]


def test_every_test_image_gets_the_class_that_evaluation_gives_it(trained: Path) -> None:
    directory, classifier = RunDirectory(trained), infssm.load(trained)
    config = load_config(directory.config())
    setup = build(config, torch.device("cpu"), Split.load(directory.split_path), weights=False)
    load_weights(setup.method, directory.weights_path(1))
    setup.method.module.eval()
    pixels = setup.stream.dataset.images.pixels[:, 0].numpy()
    for task in setup.stream:
        with torch.no_grad():
            evaluated = torch.cat([setup.method.module(batch.x) for batch in setup.eval_loader(task, "test")])
        found = classifier.predict([pixels[index] for index in task.test.indices], batch_size=16)
        assert [p.label for p in found] == [classifier.classes[k] for k in evaluated.argmax(1).tolist()]
        expected = evaluated.softmax(1).max(1).values.tolist()
        assert [p.probability for p in found] == pytest.approx(expected, rel=1e-4)


def test_every_form_of_an_image_gives_the_same_answer(trained: Path, tmp_path: Path) -> None:
    classifier = infssm.load(trained)
    pixels = load_dataset("digits").images.pixels[5, 0]
    image = Image.fromarray(pixels.numpy())
    image.save(tmp_path / "digit.png")
    forms = [tmp_path / "digit.png", str(tmp_path / "digit.png"), image, pixels, pixels.numpy(), pixels[..., None]]
    first = classifier.transform([forms[0]])
    assert all(identical(classifier.transform([form]), first) for form in forms[1:])
    found = classifier.predict(forms[0])
    assert found.label in classifier.classes
    assert found.probability == max(found.probabilities.values())
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert list(found.probabilities.values()) == sorted(found.probabilities.values(), reverse=True)


def test_model_of_an_earlier_task_knows_fewer_classes(trained: Path) -> None:
    first, last = infssm.load(trained, task=0), infssm.load(trained)
    assert first.classes == last.classes[: len(first.classes)]
    assert len(first.classes) < len(last.classes)
    assert len(first.predict(np.zeros((8, 8), np.uint8)).probabilities) == len(first.classes)
    with pytest.raises(ConfigError, match="not after task 7"):
        infssm.load(trained, task=7)


def test_needs_no_data_and_refuses_what_is_no_image(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(trained, copy)
    (copy / "split.json").unlink()
    classifier = infssm.load(copy)
    (tmp_path / "text.png").write_text("no image")
    for image, message in (
        (tmp_path / "none.png", "there is no image file"),
        (tmp_path / "text.png", "cannot read the image"),
        (torch.rand(8, 8), "must be uint8"),
        (np.zeros((8, 8, 2), np.uint8), "must be uint8"),
        (7, "got int"),
    ):
        with pytest.raises(DataError, match=message):
            classifier.predict(image)  # type: ignore[call-overload]
    (copy / "stream.json").unlink()
    with pytest.raises(DataError, match=r"stream\.json is missing"):
        infssm.load(copy)


def test_command_line(trained: Path, tmp_path: Path) -> None:
    Image.fromarray(load_dataset("digits").images.pixels[5, 0].numpy()).save(tmp_path / "digit.png")
    arguments = ["predict", str(trained), str(tmp_path / "digit.png"), "--top", "2"]
    plain = CliRunner().invoke(app, arguments)
    expected = infssm.load(trained).predict(tmp_path / "digit.png")
    assert plain.exit_code == 0, plain.output
    assert plain.output.startswith(f"{tmp_path / 'digit.png'}: {expected.label} {100 * expected.probability:.1f} %, ")
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["label"] == expected.label
    assert len(found["probabilities"]) == 2
