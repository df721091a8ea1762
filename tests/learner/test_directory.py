from __future__ import annotations

from pathlib import Path

import pytest

from infssm.errors import ConfigError, DataError
from infssm.learner.devices import environment
from infssm.learner.store.directory import RunDirectory, find_runs
from tests.bench.reports.fake import fake_run


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", "ewc", 10, weight=3.0)
    assert run.complete
    assert run.config()["method"] == {"name": "ewc", "weight": 3.0}
    assert run.env()["threads"] == 1
    assert run.matrix().aa == pytest.approx((0.3 + 0.6 + 0.7) / 3)
    assert len(run.metrics()) == 8


def test_metrics_without_their_last_half_line(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    with open(run.metrics_path, "a") as file:
        file.write('{"kind": "st')
    assert len(run.metrics()) == 8


def test_existing_runs_are_not_overwritten_unasked(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", complete=False)
    with pytest.raises(ConfigError, match=r"unfinished run.*infssm resume.*--overwrite"):
        RunDirectory.create(tmp_path / "a")
    fresh = RunDirectory.create(tmp_path / "a", overwrite=True)
    assert sorted(p.name for p in fresh.path.iterdir()) == ["checkpoints", "run.json"]


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*; choose another folder with --out"):
        RunDirectory.create(tmp_path / "file" / "run")


def test_errors_of_incomplete_and_damaged_runs(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", complete=False)
    with pytest.raises(DataError, match="not complete"):
        run.result()
    (run.path / "env.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        run.env()
    (run.path / "env.json").unlink()
    with pytest.raises(DataError, match="cannot read"):
        run.env()
    (run.path / "accuracy_matrix.csv").unlink()
    with pytest.raises(DataError, match="first task"):
        run.matrix()
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_find_runs(tmp_path: Path) -> None:
    fake_run(tmp_path / "x" / "b")
    fake_run(tmp_path / "x" / "a")
    fake_run(tmp_path / "y", complete=False)
    assert [r.path.name for r in find_runs([tmp_path])] == ["a", "b"]
    assert len(find_runs([tmp_path], complete=False)) == 3
    with pytest.raises(ConfigError, match="there is no"):
        find_runs([tmp_path / "none"])


def test_environment_names_what_ran() -> None:
    env = environment()
    assert env["packages"]["torch"].startswith("2.")
    assert env["threads"] >= 1
    assert env["kernels"]["default"] in ("cpu", "reference")
    assert isinstance(env["command"], list)
