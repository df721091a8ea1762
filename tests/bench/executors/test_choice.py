"""What the command line makes of ``--jobs`` and ``--ray``, without starting anything."""

import sys
from pathlib import Path

import pytest

from infssm.bench.executors import InProcess, LocalProcesses, RayExecutor
from infssm.cli.app import invoke
from infssm.cli.options import choose_executor
from infssm.errors import ConfigError
from infssm.learner.config.load import to_yaml
from tests.learner.tiny import tiny_config


def test_where_runs_are_carried_out() -> None:
    assert isinstance(choose_executor(1), InProcess)
    assert isinstance(choose_executor(2), LocalProcesses)


def test_choices_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not both"):
        choose_executor(2, "auto")
    monkeypatch.setenv("RANK", "0")
    assert isinstance(choose_executor(1), InProcess)
    for jobs, ray in ((2, None), (1, "auto")):
        with pytest.raises(ConfigError, match="torchrun"):
            choose_executor(jobs, ray)


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"infssm\[ray\]"):
        RayExecutor()


def test_a_grid_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    grid = [
        "method=seq,lwf-ac+lda",
        "train.lr=1e-3,1e-4",
        "train.limit_batches=1",
        "train.epochs=1",
        "train.batch_size=4",
    ]
    assert invoke(["run", *grid, "--seed", "0", "10", "-o", str(tmp_path), "--print-config"]) == 0
    assert capfd.readouterr().out.count("\nmethod:\n") == 8
    assert invoke(["run", *grid, "-o", str(tmp_path), "--dry-run"]) == 0
    assert capfd.readouterr().out.count("\ntask 0 from ") == 4
    assert not list(tmp_path.iterdir())


def test_results_on_validation_data_are_called_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_config(tmp_path)))
    for part in ("test", "val"):
        assert invoke(["run", "-c", str(tmp_path / "tiny.yaml"), f"data.evaluate={part}"]) == 0
        told = capfd.readouterr()
        assert ("task 1 done: validation accuracy per task" in told.err) == (part == "val")
        assert ("on validation data" in " ".join(told.out.split())) == (part == "val")
