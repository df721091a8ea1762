"""The run directory: everything needed to repeat, resume and read a run, in one folder or in one parcel of bytes."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from infssm._files import atomic_file, explained
from infssm._registry import shorten
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import settings_digest
from infssm.learner.metrics import AccuracyMatrix, Confusion
from infssm.learner.store import layout
from infssm.learner.store.layout import Manifest, digest_of, locked, read_checked

T = TypeVar("T")


class RunDirectory:
    """``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>/`` and the files in it.

    | file | content |
    |---|---|
    | ``run.json`` | marks the folder as a run; checksums of the other files |
    | ``config.yaml`` | the whole configuration |
    | ``env.json`` | versions, commit, threads, device, command |
    | ``split.json`` | data set indices of train, validation and test, with a hash |
    | ``stream.json`` | class names, tasks and kind of images: what the model needs to be used without the data |
    | ``metrics.jsonl`` | one line per logged step, epoch and task |
    | ``accuracy_matrix.csv`` | accuracy on every task after every task |
    | ``confusion.json`` | test images by true and predicted class, after the last task done |
    | ``result.json`` | the measures; written when the run is complete |
    | ``checkpoints/`` | ``last.ckpt`` to resume from, ``task_00.safetensors`` ... to use |
    | ``report.html`` | tables and charts of all of it |
    | ``lock`` | which process works here |

    Other files that lie in the folder stay there, whatever is done to the run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / layout.CONFIG
        self.split_path = self.path / layout.SPLIT
        self.metrics_path = self.path / layout.METRICS
        self.report_path = self.path / layout.REPORT
        self.checkpoints = self.path / layout.CHECKPOINTS
        self.last_checkpoint = self.path / layout.LAST

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunDirectory:
        """Make a new run directory; one that holds a run already is an error unless it may be overwritten."""
        run = cls(path)
        run.check_usable()
        if run.is_run and not overwrite:
            state = "a complete run" if run.complete else "an unfinished run"
            raise ConfigError(
                f"{path} holds {state} of this configuration: continue it with `infssm resume {path}`, "
                "repeat it with --overwrite, or choose another --out"
            )
        run.make()
        files = layout.our_files(path)
        # First those that would make the rest look like a run.
        first = [path / layout.RESULT, *map(run.weights_path, run.saved_tasks)]
        for file in [*(f for f in files if f in first), *(f for f in files if f not in first)]:
            if file.name != layout.MARKER:
                with explained(file):
                    file.unlink(missing_ok=True)
        Manifest().write(path)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Open an existing run directory."""
        run = cls(path)
        if not run.is_run:
            raise ConfigError(
                f"{path} is not a run directory: it has no {layout.MARKER} (give the folder that holds it, "
                "or start a run with `infssm run`, a learner with `infssm learn`)"
            )
        return run

    @property
    def is_run(self) -> bool:
        """Whether infssm made this folder: it has a ``run.json``, or all the rest where a damaged one was deleted."""
        rest = (layout.CONFIG, layout.ENV, layout.SPLIT, layout.CHECKPOINTS)
        return os.path.lexists(self.path / layout.MARKER) or all((self.path / name).exists() for name in rest)

    def check_usable(self) -> None:
        """Raise if a run in this folder would replace files that no run wrote."""
        if self.is_run:
            return
        try:
            taken = [file for file in layout.our_files(self.path) if not layout.is_unfinished_write(file)]
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; choose another folder with --out") from error
        if taken:
            raise ConfigError(
                f"{self.path} is not a run directory, but holds {taken[0].name}, which a run would replace: choose "
                "another folder with --out"
            )

    def make(self) -> None:
        """Make the folders, where they are missing."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.path}: {error.strerror}; choose another folder with --out"
            ) from error

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory: no other process works in it until the context ends."""
        return locked(self.path)

    def adopt(self) -> None:
        """Go on with an unfinished run: remove half-written files, and take checksums where ``run.json`` is lost."""
        for path in filter(layout.is_unfinished_write, layout.our_files(self.path)):
            with explained(path):
                path.unlink(missing_ok=True)
        if not os.path.lexists(self.path / layout.MARKER):
            manifest = Manifest(settings_digest(self.config()))
            for name in (layout.ENV, layout.MATRIX, *map(layout.weights_name, self.saved_tasks)):
                if (self.path / name).is_file():
                    manifest = manifest.expecting(name, digest_of((self.path / name).read_bytes()))
            manifest.write(self.path)

    def drop_checkpoints(self) -> None:
        """Remove what only serves to continue the run; the models stay."""
        for path in [*self.checkpoints.glob("last.ckpt*"), *layout.best_files(self.path)]:
            path.unlink(missing_ok=True)

    def weights_path(self, task: int) -> Path:
        """Where the model after a task is."""
        return self.path / layout.weights_name(task)

    @property
    def saved_tasks(self) -> list[int]:
        """Tasks whose model was saved and is still there."""
        return layout.tasks_of(os.listdir(self.checkpoints) if self.checkpoints.is_dir() else ())

    @property
    def complete(self) -> bool:
        """Whether the run went through all its tasks."""
        return os.path.lexists(self.path / layout.RESULT)

    def verify(self) -> None:
        """Raise for the first file that is not what the run wrote; missing files are not checked."""
        for name in Manifest.read(self.path).files:
            if os.path.lexists(self.path / name):
                self._read(name)

    def config(self) -> dict[str, Any]:
        """The configuration as nested plain values."""
        path, remedy = self.config_path, "restore it, or start a new run"
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from None
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"{path} is damaged: it is not YAML; {remedy}") from None
        if not _is_config(values):
            raise ConfigError(f"{path} is damaged: it does not hold the settings of a run; {remedy}")
        if Manifest.read(self.path).settings not in ("", settings_digest(values)):
            raise ConfigError(
                f"{path} was changed since the run began, and other settings give other results: {remedy}"
            )
        return dict(values)

    def env(self) -> dict[str, Any]:
        """The environment the run was started in."""
        return self._json(layout.ENV)

    def result(self) -> dict[str, Any]:
        """The measures of a complete run."""
        if not self.complete:
            raise DataError(f"the run {self.path} is not complete: continue it with `infssm resume {self.path}`")
        return self._json(layout.RESULT)

    def matrix(self) -> AccuracyMatrix:
        """The accuracy matrix as far as it is filled."""
        path = self.path / layout.MATRIX
        final = self.result().get("matrix") if self.complete else None
        known = None if final is None else self._parsed(layout.RESULT, lambda: AccuracyMatrix.from_json(final))
        if not os.path.lexists(path):
            if known is None:
                raise DataError(f"the run {self.path} has not finished its first task")
            return known
        content = self._read(layout.MATRIX)
        matrix = self._parsed(layout.MATRIX, lambda: AccuracyMatrix.from_csv(content.decode()))
        if known is not None and known.to_csv() != matrix.to_csv():
            raise DataError(f"{path} is damaged: it differs from the matrix in {layout.RESULT}; {layout.REMEDY}")
        return matrix if known is None else known  # which also has what a table of tasks cannot hold

    @property
    def last_task(self) -> int | None:
        """The last task whose model the run saved, whether or not the file is still there; None before the first."""
        return max([*self.saved_tasks, *layout.tasks_of(Manifest.read(self.path).files)], default=None)

    def saved_task(self, task: int | None = None) -> int:
        """The task after which the asked-for model was saved (the last one unless given); ConfigError without it."""
        wanted, saved = self.last_task if task is None else task, self.saved_tasks
        if wanted is None or wanted not in saved:
            there = f"tasks {', '.join(map(str, saved))}" if saved else "no task"
            missing = "" if wanted is None else f", not after {'the last one, ' if task is None else ''}task {wanted}"
            raise ConfigError(
                f"{self.path} has saved weights after {there}{missing}: restore the file or choose another task with "
                f"--task; continue an unfinished run with `infssm resume {self.path}`"
            )
        return wanted

    def stream(self) -> dict[str, Any]:
        """The facts about the data that the model needs, as plain values."""
        return self._json(layout.STREAM)

    def confusion(self) -> Confusion | None:
        """Which classes are taken for which; None for a run that did not record it."""
        if not os.path.lexists(self.path / layout.CONFUSION):
            return None
        values = self._json(layout.CONFUSION)
        return self._parsed(layout.CONFUSION, lambda: Confusion.from_json(values))

    def names_per_task(self) -> list[tuple[str, ...]]:
        """The classes or the domain of each task; empty if not recorded."""
        if os.path.lexists(self.path / layout.STREAM) and (domains := self.stream().get("domains")):
            return [(str(domain),) for domain in domains]
        confusion = self.confusion()
        return confusion.names_per_task if confusion else []

    def metrics(self) -> list[dict[str, Any]]:
        """All metric lines, oldest first; a last line cut short by a crash is left out."""
        if not os.path.lexists(self.metrics_path):
            return []
        found = []
        for number, line in enumerate(self._read(layout.METRICS).split(b"\n")[:-1], start=1):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if not _is_metric(values):
                raise DataError(
                    f"{self.metrics_path} is damaged in line {number}: restore it, or delete it to go on without its "
                    "curves"
                )
            found.append(values)
        return found

    def seal_metrics(self) -> None:
        """Take the checksum of the metric lines: they are complete."""
        if self.metrics_path.is_file():
            self._expect(layout.METRICS, self.metrics_path.read_bytes())

    def write(self, name: str, content: bytes, *, checked: bool = True) -> None:
        """Write a file of the run whole or not at all; ``checked``: after its checksum, which later reads ask for."""
        if checked:
            self._expect(name, content)
        path = self.path / name
        with explained(path):
            path.parent.mkdir(exist_ok=True)
            with atomic_file(path) as file:
                file.write(content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the run; the report is made of the others and never read, so it needs no checksum."""
        if name == layout.CONFIG:  # its checksum is over the settings that count, so that folders may be moved
            replace(Manifest.read(self.path), settings=settings_digest(yaml.safe_load(text))).write(self.path)
        self.write(name, text.encode(), checked=name not in (layout.CONFIG, layout.REPORT))

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file of the run whole or not at all."""
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    def write_weights(self, task: int, content: bytes) -> None:
        """Write the model after a task whole or not at all."""
        self.write(layout.weights_name(task), content)

    def _expect(self, name: str, content: bytes) -> None:
        Manifest.read(self.path).expecting(name, digest_of(content)).write(self.path)

    def _read(self, name: str) -> bytes:
        path = self.path / name
        try:
            return read_checked(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; {layout.REMEDY}") from None

    def _json(self, name: str) -> dict[str, Any]:
        content = self._read(name)
        values = self._parsed(name, lambda: json.loads(content))
        if not isinstance(values, dict):
            raise DataError(f"{self.path / name} is damaged: it holds no named values; {layout.REMEDY}")
        return values

    def _parsed(self, name: str, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except (DataError, ValueError, RecursionError) as error:
            raise DataError(f"{self.path / name} is damaged: {error}; {layout.REMEDY}") from None


def find_runs(paths: Iterable[str | os.PathLike[str]], *, complete: bool = True) -> list[RunDirectory]:
    """All run directories at or below ``paths``, sorted; only complete ones by default. Task-0 models are left out."""
    found: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"there is no {path}")
        found |= {file.parent for name in (layout.MARKER, layout.CONFIG) for file in path.rglob(name)}
    runs = [RunDirectory(path) for path in sorted(found) if path.parent.name != layout.TASK0]
    return [run for run in runs if run.complete] if complete else runs


def _is_metric(line: Any) -> bool:
    """Whether a line of the log has what reports read."""
    if not isinstance(line, dict) or not isinstance(line.get("at"), int):
        return False
    if line.get("kind") == "epoch":
        loss = line.get("loss")
        numbers = [line.get("images_per_s"), *(loss.values() if isinstance(loss, dict) else [None])]
    else:
        numbers = [line.get("lr")] if line.get("kind") == "step" else []
    return all(isinstance(number, (int, float)) for number in numbers)


def _is_config(values: Any) -> bool:
    """Whether a file's content has the sections every run's configuration has."""
    if not isinstance(values, dict) or not isinstance(values.get("seed"), int):
        return False
    sections = [values.get(section) for section in ("data", "model", "method")]
    return all(isinstance(section, dict) and isinstance(section.get("name"), str) for section in sections)


_LAST = (layout.LAST, layout.RESULT)
"""The checkpoint and the result: they are written last, after the files that they refer to."""
_OWN = (layout.MARKER, layout.CONFIG, layout.REPORT)
"""Not sent: they hold paths of this machine, and the receiver writes its own."""
_UNREADABLE = (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, RuntimeError)
"""Exceptions of zipfile and json for damaged bytes; RuntimeError includes RecursionError and NotImplementedError."""


def pack(run: RunDirectory, known: dict[str, str] | None = None) -> bytes:
    """The files of a run that is not in use as one archive; files with a digest in ``known`` only if they changed.

    ``known`` is brought up to date.
    """
    known = {} if known is None else known
    parcel = io.BytesIO()
    with zipfile.ZipFile(parcel, "w", zipfile.ZIP_STORED) as archive:
        for path in layout.our_files(run.path):
            name = path.relative_to(run.path).as_posix()
            if name in _OWN or layout.is_unfinished_write(path) or not path.is_file():
                continue
            content = path.read_bytes()
            if known.get(name) != (digest := digest_of(content)):
                known[name] = digest
                archive.writestr(name, content)
        archive.writestr(layout.MARKER, json.dumps(sorted(Manifest.read(run.path).files)))
    return parcel.getvalue()


def unpack(run: RunDirectory, parcel: bytes, config: str) -> None:
    """Write the files of a parcel to a run directory, whose configuration is ``config``, as YAML.

    Nothing but files of a run is written, and nothing outside its directory. A process may be killed at any moment:
    the run can be resumed from what was written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(parcel)) as archive:
            members = archive.infolist()
            foreign = [
                info.filename
                for info in members
                if info.compress_type != zipfile.ZIP_STORED
                or not (layout.is_ours(info.filename) or info.filename == layout.MARKER)
            ]
            files = {} if foreign else {info.filename: archive.read(info) for info in members}
            checked = [] if foreign else json.loads(files.pop(layout.MARKER))
    except _UNREADABLE as error:
        reason = shorten(" ".join(str(error).split()), 200)
        raise DataError(f"what was sent for {run.path} is not a run: {reason}") from None
    if foreign:
        raise DataError(f"what was sent for {run.path} holds {shorten(repr(foreign[0]))}, which is not a file of a run")
    if not isinstance(checked, list) or not all(isinstance(name, str) for name in checked):
        raise DataError(f"what was sent for {run.path} is not a run: its {layout.MARKER} is not a list of names")
    run.check_usable()
    run.make()
    with run.lock():
        Manifest.read(run.path).write(run.path)  # marks the folder as a run before anything else is in it
        run.write_text(layout.CONFIG, config)
        for name in sorted(files, key=lambda name: (_LAST.index(name) + 1 if name in _LAST else 0, name)):
            run.write(name, files[name], checked=name in checked)
