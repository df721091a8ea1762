"""Online streams: one pass in order, each batch tested before it is trained on, and no boundary told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infssm.bench.reports.metrics import columns
from infssm.bench.reports.tables import write_comparison
from infssm.bench.running import resume, run
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.events import Control, Interrupted, StepDone
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.setup import build, load_stream
from infssm.learner.store.directory import RunDirectory
from tests.learner.sequences import series_file


def config(out: Path, method: str = "seq", **more: Any) -> RunConfig:
    values: dict[str, Any] = {
        "data": {"name": "digits", "num_tasks": 5, "online": True, "train_per_class": 4, "test_per_class": 2},
        "model": {"name": "vim_nano", "options": {"patch_size": 4, "embed_dim": 16, "depth": 1}},
        "train": {"epochs": 1, "batch_size": 7, "threads": 1, "accelerator": "cpu"},
        "method": {"name": method, **({} if method == "seq" else {"buffer_size": 8})},
        "out": str(out),
    }
    return load_config(merge(values, more))


def labels_in_order(given: RunConfig) -> list[int]:
    setup = build(given, torch.device("cpu"))
    return [int(y) for batch in setup.train_loader(setup.task(0), 0) for y in batch.y]


def test_samples_come_once_in_the_order_of_their_tasks(tmp_path: Path) -> None:
    sharp = labels_in_order(config(tmp_path))
    assert np.bincount(sharp).tolist() == [4] * 10
    assert [label // 2 for label in sharp] == sorted(label // 2 for label in sharp)
    assert sharp != sorted(sharp)  # shuffled inside a task
    blurred = labels_in_order(config(tmp_path, data={"blur": 0.5}))
    assert np.bincount(blurred).tolist() == [4] * 10
    moved = sum(label // 2 != place // 8 for place, label in enumerate(blurred))
    assert 0 < moved < 30  # all samples at random places would be about 32
    series = str(series_file(tmp_path))
    by_domain: dict[str, Any] = {"name": series, "num_tasks": 2, "by": "domain", "train_per_class": None}
    small = {"name": "mamba_nano", "options": {"d_model": 8, "n_layer": 1}}
    given = load_config(merge(config(tmp_path).model_dump(), {"data": by_domain, "model": {"name": "mamba_nano"}}))
    given = given.model_copy(update={"model": type(given.model)(**small)})
    setup = build(given, torch.device("cpu"))
    dataset = setup.stream.dataset
    assert dataset.domain_of is not None
    index = torch.cat([batch.index for batch in setup.train_loader(setup.task(0), 0) if batch.index is not None])
    domains = dataset.domain_of[index.numpy()].tolist()
    assert domains == sorted(domains)  # not sorted by their lengths, as other loaders do
    assert setup.stream.num_tasks == 1


@pytest.mark.parametrize("method", ["seq", "er", "der", "der++"])
def test_each_batch_is_tested_before_it_is_trained_on(tmp_path: Path, method: str) -> None:
    found = run(config(tmp_path, method, train={"batch_size": 4}), quiet=True)
    lines = [line for line in RunDirectory(found.path).metrics() if line["kind"] == "online"]
    right, samples = (sum(line[key] for line in lines) for key in ("right", "samples"))
    assert (len(lines), samples) == (10, 40)
    assert found.matrix.online == right / samples
    assert found.matrix.values.shape == (1, 1)
    first = lines[0]["right"]  # of the untrained model, on the first batch
    setup = build(config(tmp_path, method, train={"batch_size": 4}), torch.device("cpu"))
    batch = next(iter(setup.train_loader(setup.task(0), 0)))
    assert first == int((setup.method.module.eval()(batch.x).argmax(1) == batch.y).sum())


def test_an_interrupted_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = run(config(tmp_path / "a", "er"), quiet=True)
    control = Control()

    def stop(event: object) -> None:
        if isinstance(event, StepDone):
            control.stop()

    with pytest.raises(Interrupted):
        run(config(tmp_path / "b", "er"), listen=stop, control=control)
    (path,) = (p.parent for p in (tmp_path / "b").rglob("run.json"))
    again = resume(path, quiet=True)
    assert again.matrix == whole.matrix
    assert AccuracyMatrix.from_json(again.matrix.to_json()).online == whole.matrix.online
    comparison, page = write_comparison([RunDirectory(whole.path)], tmp_path)
    assert list(columns(comparison.rows)) == ["aa", "online"]
    assert "along" in page.read_text()


@pytest.mark.parametrize("method", ["ewc", "lwf", "frozen", "ncm", "inf-ssm-exact", "nullspace", "joint", "er+lwf"])
def test_methods_that_need_boundaries_are_refused(tmp_path: Path, method: str) -> None:
    given = load_config(merge(config(tmp_path).model_dump(), {"method": {"name": method}}))
    with pytest.raises(
        ConfigError, match=r"no such boundaries; these methods need none: der, der[+][+], er, linear, seq"
    ):
        run(given, quiet=True)


def test_settings_that_contradict_a_single_pass_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set train.epochs=1 train.task0=own train.devices=1"):
        run(config(tmp_path, train={"epochs": 2, "task0": "skip", "devices": 2, "batch_size": 8}), quiet=True)
    with pytest.raises(ConfigError, match="set online=true"):
        config(tmp_path, data={"blur": 0.1, "online": False})
    with pytest.raises(ConfigError, match="has no tasks"):
        config(tmp_path, data={"shots": 2})
    with pytest.raises(ConfigError, match="waves has no classes"):
        load_stream(load_config(merge(config(tmp_path).model_dump(), {"data": {"name": "waves", "num_tasks": 4}})))
