"""A run whose head looks more than once, with two models, in every form in which runs are used."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infssm.bench.running import run
from infssm.data import load_dataset
from infssm.errors import ConfigError
from infssm.learner.evaluate import evaluate_run
from infssm.learner.export import TOLERANCE, export_classifier
from infssm.learner.hub import HubClassifier
from infssm.learner.predict import load_classifier as load
from infssm.learner.result import Result
from tests.compare import identical
from tests.learner.tiny import assert_same, tiny_config

ALL = {"mean_token": True, "token_spread": True, "blocks": [1, 2], "mirror": True, "first_model": True}
TWO_BLOCKS = {"model": {"options": {"depth": 2}}}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tiny_config(tmp_path_factory.mktemp("runs"), "lwf-f+gda", ALL, **TWO_BLOCKS), quiet=True)


@pytest.fixture(scope="module")
def trained(result: Result) -> Path:
    return result.path


def test_its_file_holds_both_models_and_tests_as_the_run_did(result: Result) -> None:
    weights = load_file(result.weights)
    assert weights["head.fitted.mean"].shape == (10, 2 * 2 * 4 * 16)  # models, blocks, tokens
    moved = weights["layers.0.mixer.in_proj.weight"]
    assert not torch.equal(moved, weights["head.views.first.layers.0.mixer.in_proj.weight"])
    for task in (0, 1):
        found = [score.class_incremental for score in evaluate_run(result.path, task)]
        assert found == result.matrix.values[task, : task + 1].tolist()


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_it_is_exported(trained: Path, tmp_path: Path, to: str) -> None:
    assert export_classifier(load(trained), tmp_path / "model", to) < TOLERANCE  # type: ignore[arg-type]


def test_it_goes_through_a_folder_of_the_hub(trained: Path, tmp_path: Path) -> None:
    HubClassifier(trained).save_pretrained(tmp_path / "saved")
    images = [pixels[0].numpy() for pixels in load_dataset("digits").images.pixels[:8]]
    assert HubClassifier.from_pretrained(tmp_path / "saved").predict(list(images)) == load(trained).predict(
        list(images)
    )


def test_another_run_starts_from_its_first_task(trained: Path, tmp_path: Path) -> None:
    """Task 0 was trained plainly: its file serves every method, with and without a second look."""
    start = TWO_BLOCKS | {"train": {"task0": str(trained / "checkpoints" / "task_00.safetensors")}}
    once, twice = (run(tiny_config(tmp_path / name, "gda", ALL, **start), quiet=True) for name in ("a", "b"))
    assert_same(once, twice)
    run(tiny_config(tmp_path / "seq", "seq", **start), quiet=True)


def test_first_session_adaptation_trains_task_0_itself_and_keeps_what_was_before(trained: Path, tmp_path: Path) -> None:
    weights = {"model": {"weights": str(trained / "checkpoints" / "task_00.safetensors"), **TWO_BLOCKS["model"]}}
    config = tiny_config(tmp_path, "frozen+ncm", {"start_model": True}, **weights)
    found = run(config, quiet=True)
    assert found.config.train.task0 == "own"
    own, given = load_file(found.weights), load_file(str(weights["model"]["weights"]))
    key = "layers.0.mixer.in_proj.weight"
    assert identical(own[f"head.views.first.{key}"], given[key])
    assert not identical(own[key], given[key]), "task 0 was trained"
    with pytest.raises(ConfigError, match="use train\\.task0=own"):
        run(tiny_config(tmp_path, "frozen+ncm", {"start_model": True}, train={"task0": "plain"}), quiet=True)
