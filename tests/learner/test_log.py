"""Loggers of other makers, through stand-ins that keep their rules."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infssm.learner.log import Log
from infssm.learner.store.directory import RunDirectory
from tests.learner.tiny import tiny_config

LINE = {"kind": "step", "at": 3, "task": 1, "lr": 0.1, "loss": {"ce": 2.0, "inf-ssm+/b": 0.5}}


class MLflow:
    """Runs by their id; refuses the names that MLflow refuses, and parameters that change."""

    class MlflowException(Exception):
        pass

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(MlflowException=self.MlflowException)
        self.runs: dict[str, dict[str, Any]] = {}
        self.current: str | None = None

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        assert self.current is None
        if run_id is None:
            run_id = f"id{len(self.runs)}"
            self.runs[run_id] = {"name": run_name, "params": {}, "metrics": {}}
        elif run_id not in self.runs:
            raise self.MlflowException(f"run {run_id} not found")
        self.current = run_id
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def _add(self, kind: str, values: Mapping[Any, Any]) -> None:
        assert self.current is not None
        for name in values:
            assert re.fullmatch(r"[\w.\- :/]+", name if isinstance(name, str) else name[0]), name
        known = self.runs[self.current][kind]
        assert not known.keys() & values.keys()
        known.update(values)

    def log_params(self, params: Mapping[str, str]) -> None:
        self._add("params", params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._add("metrics", {(name, step): value for name, value in metrics.items()})

    def end_run(self) -> None:
        self.current = None


def log_line(tmp_path: Path, at: int) -> None:
    log = Log(RunDirectory(tmp_path), tiny_config(tmp_path, "inf-ssm+", log={"mlflow": True}))
    log.write(LINE | {"at": at})
    log.close()


def test_mlflow_continues_a_run_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in (MLflow(), MLflow()):
        monkeypatch.setitem(sys.modules, "mlflow", server)
        log_line(tmp_path, 3)
        log_line(tmp_path, 4)
        (run,) = server.runs.values()
        assert run["name"] == f"inf-ssm+/{tmp_path.name}"
        assert run["params"]["train.lr"] == "0.001"
        names = {"step/lr": 0.1, "step/loss/ce": 2.0, "step/loss/inf-ssm-plus/b": 0.5}
        assert run["metrics"] == {(name, at): value for at in (3, 4) for name, value in names.items()}
