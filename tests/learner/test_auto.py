"""`weight: auto` in a run: what it measures on language, and that the run says what it chose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from infssm.bench.running import run
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.optim import build_optimizer, decay_groups, learning_rate, set_learning_rate
from infssm.learner.setup import build, load_weights
from infssm.learner.store.directory import RunDirectory
from infssm.methods import train_step
from infssm.methods.regularizers.auto_weight import SHARE
from tests.learner.sequences import config, text_folder

SHORT = {"epochs": 1, "limit_batches": 2}


def expected_weight(chosen: RunConfig, task0: Path) -> float:
    """Two steps of the second task written out, the second one's gradients taken apart."""
    fixed = load_config(merge(chosen.model_dump(), {"method": {"weight": 1.0}}))
    setup = build(fixed, torch.device("cpu"))
    method, task, train = setup.method, setup.stream[1], setup.config.train
    method.begin_task(setup.stream[0])
    load_weights(method, task0)
    method.end_task(setup.stream[0])
    method.begin_task(task)
    optimizer = build_optimizer(decay_groups(method.module, train.weight_decay))
    first, second = (batch for _, batch in zip(range(2), setup.train_loader(task, 0), strict=False))
    set_learning_rate(optimizer, learning_rate(train, 1, 0, epochs=1, progress=0.0))
    train_step(lambda: {"ce": method.loss(first)["ce"]}, optimizer)
    parameters = list(method.module.parameters())
    own, loss = (
        torch.autograd.grad(method.loss(second)[name], parameters, allow_unused=True)
        for name in ("inf-ssm-exact/distance", "ce")
    )
    lengths = [
        sum(float(a.double().square().sum()) for a, b in zip(part, own, strict=True) if a is not None and b is not None)
        for part in (loss, own)
    ]
    return SHARE * (lengths[0] / lengths[1]) ** 0.5


def test_language_is_measured_and_the_weight_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config(f"text:{text_folder(tmp_path)}", tmp_path, "inf-ssm-exact", {"measure_at": 2}, train=SHORT)
    found = run(chosen)
    directory = RunDirectory(found.path)
    tasks = [line for line in directory.metrics() if line["kind"] == "task"]
    assert ["chosen" in line for line in tasks] == [False, True]
    weight = tasks[1]["chosen"]["inf-ssm-exact.weight"]
    assert weight == pytest.approx(expected_weight(chosen, directory.weights_path(0)), rel=1e-3)
    (shown,) = re.findall(r"chosen automatically: inf-ssm-exact\.weight (\S+)", capsys.readouterr().err)
    assert float(shown) == pytest.approx(weight, rel=1e-2)


def test_a_weight_that_was_given_is_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(config(f"text:{text_folder(tmp_path)}", tmp_path, "inf-ssm-exact", {"weight": 1.0}, train=SHORT))
    assert all("chosen" not in line for line in RunDirectory(found.path).metrics())
    assert "chosen automatically" not in capsys.readouterr().err
