"""A learner that is taught the tasks of a stream, each in a new process, equals the run bit for bit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import infssm
from infssm.bench.running import run
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, to_dict
from infssm.learner.learner import Learner
from infssm.learner.predict import load_classifier
from infssm.learner.result import Result
from infssm.learner.setup import load_stream
from tests.compare import identical
from tests.learner.sequences import config as sequence_config
from tests.learner.sequences import sound_folder, text_folder
from tests.learner.tiny import tiny_config

ONE_EPOCH = {"train": {"epochs": 1, "select_best": False}, "model": {"classes": "grow"}}
PRELOADED = [__name__, "lightning_fabric", "sklearn.datasets"]


def teach(folder: Path, config: RunConfig, index: int) -> None:
    """Teach one task, as a process that knows nothing but the folder and the settings."""
    torch.set_num_threads(1)
    if index:
        learner = Learner.load(folder)
    else:
        settings = to_dict(config)
        learner = Learner(method=config.method.name, seed=config.seed, folder=folder, settings=settings)
    learner.learn(load_stream(config)[index])


def taught(folder: Path, config: RunConfig) -> Learner:
    """A learner that was taught both tasks, each in a process of its own, which a server with all imports forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for task in range(2):
        process = context.Process(target=teach, args=(folder, config, task))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    return Learner.load(folder)


def assert_same(learner: Learner, result: Result) -> None:
    """The weights of the run, those of its head included."""
    ours, theirs = learner._now.taught()[0].weights(), load_file(result.weights)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not identical(ours[name], theirs[name])] == []


@pytest.mark.parametrize("method", ["frozen+gda", "seq", "lwf-f+gda", "er", "inf-ssm-exact+lda"])
def test_images(tmp_path: Path, method: str) -> None:
    config = tiny_config(tmp_path / "runs", method, **ONE_EPOCH)
    result, stream = run(config, quiet=True), load_stream(config)
    learner, classifier = taught(tmp_path / "learner", config), load_classifier(result.path)
    assert_same(learner, result)
    images = [stream[1].test.dataset.images.pil(index) for task in stream for index in task.test.indices]
    assert learner.predict(images) == classifier.predict(images)
    # A run that ended with the first task learns the second like any learner.
    first = run(load_config(merge(to_dict(config), {"data": {"tasks": [[0, 1, 2, 3, 4]]}})), quiet=True)
    continued = Learner.load(first.path)
    assert continued.classes == ("0", "1", "2", "3", "4")
    continued.learn(stream[1])
    assert_same(continued, result)
    assert infssm.load(first.path).predict(images) == classifier.predict(images)


def test_text_by_domains(tmp_path: Path) -> None:
    source = f"text:{text_folder(tmp_path)}"
    config = sequence_config(source, tmp_path / "runs", "lwf")
    learner, result = taught(tmp_path / "learner", config), run(config, quiet=True)
    assert_same(learner, result)
    assert (learner.modality, learner.classes) == ("language", ("digits", "letters"))
    the_run = Learner.load(result.path)
    assert learner.evaluate(source).bits == the_run.evaluate(source).bits
    assert learner.generate("the", 20, seed=0) == the_run.generate("the", 20, seed=0)


def test_sounds(tmp_path: Path) -> None:
    config = sequence_config(
        str(sound_folder(tmp_path)), tmp_path / "runs", "frozen+gda", data={"by": "class"}, model={"classes": "grow"}
    )
    learner, result = taught(tmp_path / "learner", config), run(config, quiet=True)
    assert_same(learner, result)
    wave = torch.randn(500).clamp(-1, 1)
    assert learner.predict(wave) == load_classifier(result.path).predict(wave)
