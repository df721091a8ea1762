"""The run directory: everything needed to repeat, resume and read a run, in one folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from infssm.errors import ConfigError, DataError
from infssm.metrics import AccuracyMatrix


class RunDirectory:
    """``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>/`` and the files in it.

    | file | content |
    |---|---|
    | ``config.yaml`` | the whole configuration |
    | ``env.json`` | versions, commit, threads, device, command |
    | ``split.json`` | data set indices of train, validation and test, with a hash |
    | ``metrics.jsonl`` | one line per logged step, epoch and task |
    | ``accuracy_matrix.csv`` | accuracy on every task after every task |
    | ``result.json`` | the measures; written when the run is complete |
    | ``checkpoints/`` | ``last.ckpt`` to resume from, ``task_00.safetensors`` ... to use |
    | ``report.html`` | all of it to look at |
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunDirectory:
        """Make a new run directory; one that holds a run already is an error unless it may be overwritten."""
        run = cls(path)
        if run.config_path.exists() and not overwrite:
            state = "a complete run" if run.complete else "an unfinished run"
            raise ConfigError(
                f"{path} holds {state} of this configuration: continue it with `infssm resume {path}`, "
                "repeat it with --overwrite, or choose another --out"
            )
        try:
            if path.exists():
                shutil.rmtree(path)
            run.checkpoints.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}; choose another folder with --out") from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open an existing run directory."""
        run = cls(path)
        if not run.config_path.exists():
            raise ConfigError(f"{path} is not a run directory: it has no {run.config_path.name}")
        return run

    @property
    def config_path(self) -> Path:
        """Where the configuration is."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def split_path(self) -> Path:
        """Where the split is stored."""
        return self.path / "split.json"

    @property
    def metrics_path(self) -> Path:
        """Where the metric lines are."""
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        """Where the HTML report is."""
        return self.path / "report.html"

    @property
    def complete(self) -> bool:
        """Whether the run went through all its tasks."""
        return (self.path / "result.json").exists()

    def config(self) -> dict[str, Any]:
        """The configuration as nested plain values."""
        values: dict[str, Any] = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        return values

    def env(self) -> dict[str, Any]:
        """The environment the run was started in."""
        return self._json("env.json")

    def result(self) -> dict[str, Any]:
        """The measures of a complete run."""
        if not self.complete:
            raise DataError(f"the run {self.path} is not complete: continue it with `infssm resume {self.path}`")
        return self._json("result.json")

    def matrix(self) -> AccuracyMatrix:
        """The accuracy matrix as far as it is filled."""
        path = self.path / "accuracy_matrix.csv"
        if not path.exists():
            raise DataError(f"the run {self.path} has not finished its first task")
        return AccuracyMatrix.from_csv(path)

    def metrics(self) -> list[dict[str, Any]]:
        """All metric lines, oldest first; a last line cut short by a crash is left out."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run whole or not at all."""
        path = self.path / name
        part = path.with_name(f".{name}.writing")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file of the run whole or not at all."""
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        return values


def find_runs(paths: Iterable[str | os.PathLike[str]], *, complete: bool = True) -> list[RunDirectory]:
    """All run directories at or below ``paths``, sorted; only complete ones by default."""
    found: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"there is no {path}")
        found |= {config.parent for config in path.rglob("config.yaml")}
    runs = [RunDirectory(path) for path in sorted(found)]
    return [run for run in runs if run.complete] if complete else runs
