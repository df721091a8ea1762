"""A learner that is taught the tasks of a stream one by one, from its folder, equals the run bit for bit."""

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

ONE_EPOCH = {"train": {"epochs": 1, "select_best": False}}
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


def assert_same(folder: Path, result: Result) -> None:
    """The weights of the run, those of its head included."""
    ours, theirs = Learner.load(folder)._now.taught()[0].weights(), load_file(result.weights)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not identical(ours[name], theirs[name])] == []


def test_each_process_teaches_one_task(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "runs", "inf-ssm-exact+lda", **ONE_EPOCH)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for task in range(config.data.num_tasks):
        process = context.Process(target=teach, args=(tmp_path / "learner", config, task))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert_same(tmp_path / "learner", run(config, quiet=True))


@pytest.mark.parametrize("method", ["frozen+gda", "seq", "lwf-f+gda", "er", "inf-ssm-exact+lda"])
def test_images(tmp_path: Path, method: str) -> None:
    config = tiny_config(tmp_path / "runs", method, **ONE_EPOCH)
    result = run(config, quiet=True)
    stream = load_stream(config)
    for task in stream:
        teach(tmp_path / "learner", config, task.index)
    assert_same(tmp_path / "learner", result)
    # A run that ended with the first task learns the second like any learner.
    first = run(load_config(merge(to_dict(config), {"data": {"tasks": [[0, 1, 2, 3, 4]]}})), quiet=True)
    continued = Learner.load(first.path)
    assert continued.classes == ("0", "1", "2", "3", "4")
    continued.learn(stream[1])
    assert_same(first.path, result)
    images = [stream[1].test.dataset.images.pil(index) for index in stream[1].test.indices]
    assert infssm.load(first.path).predict(images) == load_classifier(result.path).predict(images)


def test_text_by_domains(tmp_path: Path) -> None:
    config = sequence_config(f"text:{text_folder(tmp_path)}", tmp_path / "runs", "lwf")
    for task in range(2):
        teach(tmp_path / "learner", config, task)
    assert_same(tmp_path / "learner", run(config, quiet=True))
    learner = Learner.load(tmp_path / "learner")
    assert (learner.modality, learner.classes) == ("language", ("digits", "letters"))


def test_sounds(tmp_path: Path) -> None:
    config = sequence_config(str(sound_folder(tmp_path)), tmp_path / "runs", "frozen+gda", data={"by": "class"})
    for task in range(2):
        teach(tmp_path / "learner", config, task)
    result = run(config, quiet=True)
    assert_same(tmp_path / "learner", result)
    wave = torch.randn(500).clamp(-1, 1)
    assert Learner.load(tmp_path / "learner").predict(wave) == load_classifier(result.path).predict(wave)
