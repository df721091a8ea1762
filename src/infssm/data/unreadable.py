"""Files that cannot be read: found before training, remembered per folder."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from infssm._files import atomic_file
from infssm.data.dataset import Dataset
from infssm.data.images import FileImages
from infssm.data.places import cache_root
from infssm.data.sequences import WavFiles
from infssm.errors import DataError

Progress = Callable[[int, int], None]
"""Told the files read and the files to read."""

_Known = dict[str, tuple[int, int]]
"""Bytes and time of change, in nanoseconds, of files that could be read."""

_WORD = {FileImages: "image", WavFiles: "sound"}
_VERSION = 1
_SHOWN = 10


def find_unreadable(dataset: Dataset, progress: Progress | None = None) -> dict[int, str]:
    """Index and reason of every file that cannot be read; empty for samples in memory.

    Every file is decoded once. That it could be is kept under the cache root, and the file is looked at again only when
    its size or its time of change is another.
    """
    files = dataset.samples
    if not isinstance(files, FileImages | WavFiles):
        return {}
    store = cache_root() / "readable" / f"{hashlib.sha256(str(files.root.resolve()).encode()).hexdigest()[:16]}.json"
    known = _read(store)
    marks = [_mark(files.root / path) for path in files.paths]
    new = [n for n, path in enumerate(files.paths) if known.get(path) != marks[n]]
    bad: dict[int, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without holding the interpreter's lock
        for done, (number, reason) in enumerate(zip(new, pool.map(files.why_unreadable, new), strict=True), 1):
            if reason is not None:
                bad[number] = reason
            if progress is not None:
                progress(done, len(new))
    if len(new) > len(bad):
        _write(store, known | {files.paths[n]: marks[n] for n in new if n not in bad})
    return bad


def require_readable(dataset: Dataset, *, skip_unreadable: bool = False, progress: Progress | None = None) -> Dataset:
    """The data set if every file of it can be read; DataError lists those that cannot.

    Args:
        dataset: the data.
        skip_unreadable: return the data set without them instead, with a warning.
        progress: see :data:`Progress`.
    """
    bad = find_unreadable(dataset, progress)
    if not bad:
        return dataset
    files = dataset.samples
    assert isinstance(files, FileImages | WavFiles)
    if skip_unreadable:
        warnings.warn(f"{dataset.name}: {len(bad)} files cannot be read and are left out", UserWarning, stacklevel=2)
        return _without(dataset, files, set(bad))
    shown = "\n".join(
        f"  cannot read the {_WORD[type(files)]} {files.root / files.paths[n]}: {reason}"
        for n, reason in list(bad.items())[:_SHOWN]
    )
    more = f"\n  and {len(bad) - _SHOWN} more: infssm data check {files.root} lists all" if len(bad) > _SHOWN else ""
    raise DataError(
        f"{dataset.name}: {len(bad)} of {len(dataset)} files cannot be read\n{shown}{more}\n"
        "replace or delete them, or go on without them: data.skip_unreadable=true"
    )


def _without(dataset: Dataset, files: FileImages | WavFiles, bad: set[int]) -> Dataset:
    keep = np.array([n for n in range(len(dataset)) if n not in bad], dtype=np.int64)
    num_test = int((keep >= len(dataset) - dataset.num_test).sum())
    kept = replace(files, paths=tuple(files.paths[n] for n in keep))
    domain_of = None if dataset.domain_of is None else dataset.domain_of[keep]
    return replace(dataset, samples=kept, labels=dataset.labels[keep], num_test=num_test, domain_of=domain_of)


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _read(store: Path) -> _Known:
    """What is stored; nothing where it is missing, damaged or of another version."""
    try:
        stored = json.loads(store.read_text(encoding="utf-8"))
        if stored["version"] != _VERSION:
            return {}
        return {str(path): (int(size), int(time)) for path, (size, time) in stored["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(store: Path, known: _Known) -> None:
    """Keep it for next time, whole or not at all; where that cannot be, next time looks again."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(store) as file:
            file.write(json.dumps({"version": _VERSION, "files": known}).encode())
    except OSError:
        return
