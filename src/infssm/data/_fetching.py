"""Getting a data set, and checking one that is there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from infssm.data.archive import extract
from infssm.data.dataset import Dataset
from infssm.data.download import Progress, download, verify_file
from infssm.data.files import data_root
from infssm.data.registry import DATASETS, Archive, load_dataset
from infssm.data.unreadable import find_unreadable
from infssm.errors import ConfigError, DataError


def fetch(name: str, root: str | Path | None = None, *, progress: Progress | None = None) -> list[Path]:
    """Download and unpack a data set under the data root; what is there already is left alone.

    An archive the user has put under the data root is used, and kept.

    Args:
        name: a registered data set.
        root: data root; see :func:`~infssm.data.data_root`.
        progress: told about every piece of a download: bytes present, bytes expected or None.

    Returns:
        The folders that hold the data.
    """
    entry = DATASETS[name]
    if not entry.archives:
        raise ConfigError(f"there is nothing to fetch for {name!r}: {entry.summary or 'it needs no download'}")
    place = data_root(root)
    return [_fetch_archive(archive, place, progress) for archive in entry.archives]


def _fetch_archive(archive: Archive, root: Path, progress: Progress | None) -> Path:
    target = root / archive.target
    if target.exists():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = root / archive.file
        # Two processes that fetch the same archive would write into one partial download: the second waits for the
        # first and then finds the data. The system releases the lock of a process that is killed.
        with FileLock(root / f".{archive.file}.lock"):
            if target.exists():
                return target
            found = file.exists()
            if found:
                verify_file(file, md5=archive.md5, sha256=archive.sha256)
            else:
                download(archive.url, file, md5=archive.md5, sha256=archive.sha256, progress=progress)
            with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as scratch:
                extract(file, Path(scratch))
                found_inside = [*Path(scratch).glob(archive.creates), *Path(scratch).glob(f"*/{archive.creates}")]
                if not found_inside:
                    raise DataError(f"{file} does not hold {archive.creates}")
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(found_inside[0], target)
            if not found:
                file.unlink()
    except OSError as error:
        free = shutil.disk_usage(root).free if root.exists() else 0
        raise DataError(f"cannot write under {root}: {error.strerror} ({free >> 20} MiB free)") from error
    return target


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found.

    Attributes:
        name: of the data set.
        root: where it was looked for.
        classes: number of classes found.
        images: number of images found.
        unreadable: files that cannot be read, with the reason.
        problems: everything that is wrong, in words; empty when all is well.
    """

    name: str
    root: Path
    classes: int = 0
    images: int = 0
    unreadable: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check(
    name: str, root: str | Path | None = None, *, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Count classes and images, read every file not read before, and say what is missing and where it was looked for.

    Args:
        name: a registered data set, or your own (see :func:`~infssm.data.load_dataset`).
        root: data root.
        progress: told the files read and the files to read.
    """
    place = data_root(root)
    try:
        dataset = load_dataset(name, root)
    except DataError as error:
        return CheckReport(name, place, problems=(str(error),))
    problems = _count_problems(name, dataset)
    paths = getattr(dataset.samples, "paths", ())
    unreadable = [(paths[number], reason) for number, reason in find_unreadable(dataset, progress).items()]
    if unreadable:
        problems.append(f"{len(unreadable)} files cannot be read, first {unreadable[0][0]}: {unreadable[0][1]}")
    return CheckReport(name, place, dataset.num_classes, len(dataset), tuple(unreadable), tuple(problems))


def _count_problems(name: str, dataset: Dataset) -> list[str]:
    if name not in DATASETS:
        return []
    entry = DATASETS[name]
    pairs = (("classes", entry.classes, dataset.num_classes), ("images", entry.images, len(dataset)))
    return [f"{found} {what}, expected {wanted}" for what, wanted, found in pairs if wanted not in (None, found)]
