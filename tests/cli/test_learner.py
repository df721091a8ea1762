"""``infssm predict``, ``eval`` and ``export`` on the folder of a learner."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import infssm
from infssm.cli.app import invoke
from infssm.integrations.serve import app as server
from tests.learner.taught import digit_files, taught


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner") / "digits"
    taught(folder)
    return folder


def test_predictions_are_those_of_the_learner(
    learner: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = digit_files(tmp_path / "photos", classes=2, count=2)
    Image.fromarray(np.tile(np.uint8([0, 255]), (8, 4))).save(folder / "stripes.png")
    assert invoke(["predict", str(learner), str(folder), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = infssm.load(learner).predict([Path(line["file"]) for line in lines])
    assert [(line["label"], line["known"]) for line in lines] == [(p.label, p.known) for p in expected]
    for line, prediction in zip(lines, expected, strict=True):
        assert line["probabilities"] == pytest.approx(dict(list(prediction.probabilities.items())[:3]), abs=1e-5)
    assert not lines[-1]["known"]  # stripes
    assert invoke(["predict", str(learner), str(folder / "stripes.png"), "--top", "1"]) == 0
    assert "unknown; most like" in capsys.readouterr().out
    assert invoke(["predict", str(learner), str(folder), "--task", "0"]) == 2


def test_a_learner_is_tested_on_data_of_known_classes(
    learner: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = digit_files(tmp_path / "test", classes=3, count=9)
    assert invoke(["eval", str(learner), str(folder), "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out), infssm.load(learner).evaluate(folder)
    assert (found["accuracy"], found["unknown"], found["per_class"]) == (
        expected.accuracy, expected.unknown, expected.per_class,
    )  # fmt: skip
    assert found["samples"] == dict.fromkeys(("digit 0", "digit 1", "digit 2"), 9)
    assert sum(n for _, _, n in found["confusion"]["images"]) == 27
    assert invoke(["eval", str(learner), str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{100 * expected.accuracy:.2f} % of 27 samples right")
    assert len(said) == 4
    for arguments, reason in (
        (["eval", str(learner)], "name some to test it on"),
        (["eval", str(learner), str(folder), "--task", "0"], "leave them out"),
    ):
        assert invoke(arguments) == 2
        assert reason in " ".join(capsys.readouterr().err.split())
    digit_files(tmp_path / "other", classes=7, count=2)
    assert invoke(["eval", str(learner), str(tmp_path / "other")]) == 3
    assert "does not know the class 'digit 5'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "192.168.0.7"])
def test_other_hosts_are_served_with_a_token(host: str, learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(server, "run_server", lambda learner, **options: asked.update(options, classes=learner.classes))
    assert invoke(["serve", str(learner), "--host", host]) == 0
    assert (asked["host"], asked["port"], len(asked["classes"])) == (host, 7860, 5)
    assert (asked["token"] is None) == (host in ("127.0.0.1", "localhost", "::1"))


def test_a_new_folder_is_served_and_a_language_model_is_not(
    learner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    monkeypatch.setattr(server, "run_server", lambda learner, **_: found.append(learner))
    assert invoke(["serve", str(tmp_path / "new")]) == 0
    assert found[0].classes == ()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 40, 50, 3), np.uint8)
    assert found[0].learn(pixels, ["a", "a", "b", "b"]).samples == {"a": 2, "b": 2}
    monkeypatch.setattr(infssm.Learner, "has_classes", False)
    assert invoke(["serve", str(learner)]) == 2
    assert "cannot be served" in " ".join(capsys.readouterr().err.split())
