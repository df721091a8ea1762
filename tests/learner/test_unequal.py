"""Tasks of different sizes through whole runs: every base method, the measures, the report."""

import numpy as np
import pytest
import torch

from infssm.bench.running import run
from infssm.bench.timing import estimate
from infssm.errors import ConfigError
from infssm.learner.config.load import load_config
from infssm.learner.setup import build, load_stream
from infssm.methods import list_methods

from .tiny import TINY, tiny_config

UNEQUAL = {"data": {"tasks": [[0, 1, 2, 3], [4], [5, 6, 7]], "train_per_class": 6, "test_per_class": 4}}
REPLAY = {name: {"buffer_size": 16} for name in ("er", "der", "der++", "x-der", "lucir", "clfd", "l2p-r")}


@pytest.mark.parametrize("name", [m for m in list_methods() if m in {*REPLAY, "seq", "joint", "inf-ssm-exact"}])
def test_a_run_of_unequal_tasks(tmp_path, name):
    options = REPLAY.get(name, {}) | ({"finetune_epochs": 1} if name == "lucir" else {})
    options |= {"measure_at": 1} if name == "inf-ssm-exact" else {}  # a task has one or two steps
    config = tiny_config(tmp_path, name, options, **UNEQUAL, train={"epochs": 1, "limit_batches": 2})
    result = run(config, quiet=True)
    matrix = result.matrix
    assert (matrix.steps, matrix.num_tasks) == (3, 3)
    counts = [16, 4, 12]
    right = matrix.values[2] * counts
    assert np.allclose(right, np.rint(right))
    assert matrix.class_incremental.weighted_aa == pytest.approx(right.sum() / 32)
    assert matrix.aa == pytest.approx(matrix.values[2].mean())
    assert "3 tasks" in result.report.read_text()


def test_heads_follow_the_tasks(tmp_path):
    lucir = build(tiny_config(tmp_path, "lucir", **UNEQUAL), torch.device("cpu"))
    assert [len(block) for block in lucir.method.base.head.weights] == [4, 1, 3]
    xder = build(tiny_config(tmp_path, "x-der", **UNEQUAL), torch.device("cpu"))
    xder.method.begin_task(xder.stream[1])
    heads = xder.method.base.heads
    assert (heads.past, heads.present, heads.future) == (slice(0, 4), slice(4, 5), slice(5, 8))
    assert heads.future_widths == (3,)


def test_the_configuration_counts_and_describes_tasks(tmp_path):
    config = tiny_config(tmp_path, **UNEQUAL)
    assert config.data.num_tasks == 3
    assert config.benchmark_name == "digits-3"
    assert "3 tasks of 4, 1, 3 classes, 48 / 32 / 32 images" in estimate(config).title
    assert "2 tasks of 5 classes" in estimate(load_config(TINY)).title
    stream = load_stream(load_config(TINY, ["data.base_classes=4", "data.num_tasks=4", "data.class_order_seed=1"]))
    assert stream.task_sizes == (4, 2, 2, 2)


def test_few_shot_tasks_have_few_training_images_and_all_test_images(tmp_path):
    data = {"num_tasks": 3, "base_classes": 6, "train_per_class": None, "test_per_class": None, "shots": 2}
    stream = load_stream(tiny_config(tmp_path, data=data))
    assert [len(task.train) for task in stream][1:] == [4, 4]
    assert len(stream[0].train) > 600
    assert min(len(task.test) for task in stream) > 60
    again = load_stream(tiny_config(tmp_path, data=data), stream.split)  # as resuming does
    assert [len(task.train) for task in again] == [len(task.train) for task in stream]
    result = run(tiny_config(tmp_path, "frozen+etf", {"steps": 5}, data=data), quiet=True)
    assert 0 < result.matrix.summary()["harmonic"] < 1


def test_shots_of_domains_are_refused(tmp_path):
    config = load_config({"data": {"name": "stdlib-text", "num_tasks": 2, "shots": 3}, "model": "mamba_lm_nano"})
    with pytest.raises(ConfigError, match="make tasks by class"):
        load_stream(config)
