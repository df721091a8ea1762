"""metrics.jsonl always; TensorBoard, Weights & Biases and MLflow on request."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infssm._files import explained
from infssm.errors import ConfigError, DataError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import flatten
from infssm.learner.store.directory import RunDirectory

_Sink = tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]
"""Functions of another logger: ``write(values, step)`` and ``close()``."""


class Log:
    """Metric lines of a run: each a mapping with ``kind`` (step, epoch, task) and ``at``, the step of the whole run."""

    def __init__(self, run: RunDirectory, config: RunConfig, *, keep: int = 0, digest: str | None = None) -> None:
        """Open the log; ``keep`` is how many bytes the checkpoint to resume from knows, with their digest."""
        wanted = [name for name, on in config.log.model_dump().items() if on]
        self._path = run.metrics_path
        self._hash = hashlib.sha256(_earlier(self._path, keep, digest))
        self._sinks: list[_Sink] = [_SINKS[name](run.path, config) for name in wanted]
        with explained(self._path):
            self._file = open(self._path, "ab")  # noqa: SIM115 - closed by close()
            self._file.truncate(min(keep, self._path.stat().st_size))

    @property
    def position(self) -> int:
        """Bytes written so far, all of them on disk."""
        with explained(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes written so far."""
        return self._hash.hexdigest()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, and send its numbers to the other loggers."""
        content = json.dumps(line).encode() + b"\n"
        with explained(self._path):
            self._file.write(content)
            self._file.flush()
        self._hash.update(content)
        for write, _ in self._sinks:
            write(_numbers(line), line["at"])

    def close(self) -> None:
        """Close all files and connections."""
        self._file.close()
        for _, close in self._sinks:
            close()


def _earlier(path: Path, keep: int, digest: str | None) -> bytes:
    """The part of a log that the checkpoint knows; empty if the user deleted the log."""
    if not keep or not os.path.lexists(path):
        return b""
    remedy = "restore it, or delete it to continue with a log that starts here"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    if len(content) < keep:
        raise DataError(
            f"{path} is damaged: the checkpoint knows {keep} bytes of it, {len(content)} are left; {remedy}"
        )
    if digest not in (None, hashlib.sha256(content[:keep]).hexdigest()):
        raise DataError(f"{path} is damaged: its checksum is not the one in the checkpoint; {remedy}")
    return content[:keep]


def _numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line under names such as ``epoch/loss/ce``."""
    prefix = prefix or f"{line['kind']}/"
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and key not in ("at", "task", "epoch", "step"):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


def _tensorboard(path: Path, config: RunConfig) -> _Sink:  # noqa: ARG001 - one signature for all loggers
    writer = _need("torch.utils.tensorboard", "bench").SummaryWriter(str(path / "tensorboard"))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(path: Path, config: RunConfig) -> _Sink:
    run = _need("wandb", "wandb").init(
        project="infssm",
        group=config.benchmark_name,
        name=f"{config.method.name}/{path.name}",
        dir=str(path),
        id=path.name,
        resume="allow",
        config=config.model_dump(),
    )
    return lambda values, step: run.log(dict(values), step=step), run.finish


def _mlflow(path: Path, config: RunConfig) -> _Sink:
    mlflow = _need("mlflow", "mlflow")
    mlflow.set_experiment(config.benchmark_name)
    note = path / "mlflow.txt"
    known = False
    if note.exists():  # continue the run of an interrupted part, unless the server does not know it
        with suppress(mlflow.exceptions.MlflowException):
            mlflow.start_run(run_id=note.read_text())
            known = True
    if not known:
        run = mlflow.start_run(run_name=f"{config.method.name}/{path.name}")
        note.write_text(run.info.run_id)
        mlflow.log_params({_mlflow_name(key): str(value) for key, value in flatten(config.model_dump())})

    def write(values: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=step)

    return write, mlflow.end_run


def _mlflow_name(name: str) -> str:
    """A name without what MLflow refuses: ``inf-ssm+/b`` becomes ``inf-ssm-plus/b``."""
    return re.sub(r"[^\w.:/ -]", "_", name.replace("+", "-plus"))


_SINKS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"log.{module.split('.')[-1]} needs: pip install 'infssm[{extra}]'") from None
