"""metrics.jsonl always; TensorBoard, Weights & Biases and MLflow on request."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from infssm._files import explained
from infssm.errors import ConfigError, DataError
from infssm.learner.config.fields import RunConfig
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.settings import flatten


class _Sink(Protocol):
    def write(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Log:
    """Metric lines of a run: each a mapping with ``kind`` (step, epoch, task) and ``at``, the step of the whole run."""

    def __init__(self, run: RunDirectory, config: RunConfig, *, keep: int = 0, digest: str | None = None) -> None:
        """Open the log; ``keep`` is how many bytes of an earlier part of the run are still true, with their digest."""
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
        for sink in self._sinks:
            sink.write(_numbers(line), line["at"])

    def close(self) -> None:
        """Close all files and connections."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _earlier(path: Path, keep: int, digest: str | None) -> bytes:
    """The part of a log that is still true; empty where the user took the log away."""
    if not keep or not os.path.lexists(path):
        return b""
    remedy = "restore it, or delete it to go on with a log that starts here"
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


class _TensorBoard:
    def __init__(self, path: Path, config: RunConfig) -> None:  # noqa: ARG002 - one signature for all sinks
        module = _need("torch.utils.tensorboard", "bench")
        self._writer = module.SummaryWriter(str(path / "tensorboard"))

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, path: Path, config: RunConfig) -> None:
        module = _need("wandb", "wandb")
        self._run = module.init(
            project="infssm",
            group=config.benchmark_name,
            name=f"{config.method.name}/{path.name}",
            dir=str(path),
            id=path.name,
            resume="allow",
            config=config.model_dump(),
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, path: Path, config: RunConfig) -> None:
        self._module = _need("mlflow", "mlflow")
        self._module.set_experiment(config.benchmark_name)
        note = path / "mlflow.txt"
        if note.exists() and self._continued(note.read_text()):
            return
        run = self._module.start_run(run_name=f"{config.method.name}/{path.name}")
        note.write_text(run.info.run_id)
        self._module.log_params({_mlflow_name(key): str(value) for key, value in flatten(config.model_dump())})

    def _continued(self, run_id: str) -> bool:
        """Go on with the run of an interrupted part, unless the server does not know it."""
        try:
            self._module.start_run(run_id=run_id)
        except self._module.exceptions.MlflowException:
            return False
        return True

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


def _mlflow_name(name: str) -> str:
    """A name without what MLflow refuses: ``inf-ssm+/b`` becomes ``inf-ssm-plus/b``."""
    return re.sub(r"[^\w.:/ -]", "_", name.replace("+", "-plus"))


_SINKS: dict[str, Callable[[Path, RunConfig], _Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"log.{module.split('.')[-1]} needs: pip install 'infssm[{extra}]'") from None
