"""Fetching data sets: a download that can be resumed, an archive that is not trusted, and a check of the files."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from filelock import FileLock

from infssm.data.dataset import DATASETS, Archive, find_unreadable, load_dataset
from infssm.data.files import Progress, data_root, require_regular
from infssm.errors import ConfigError, DataError

Received = Callable[[int, int | None], None]
"""Called with the bytes present and the bytes expected (None if the server does not say)."""

_CHUNK = 1 << 18


def fetch(name: str, root: str | Path | None = None) -> list[Path]:
    """Download and unpack a data set under the data root; files that exist already are kept.

    An archive that the user has put under the data root is used and kept. Returns the folders that hold the data.
    """
    entry = DATASETS[name]
    if not entry.archives:
        raise ConfigError(f"there is nothing to fetch for {name!r}: {entry.summary or 'it needs no download'}")
    place = data_root(root)
    try:
        place.mkdir(parents=True, exist_ok=True)
        return [_fetch_archive(archive, place) for archive in entry.archives]
    except OSError as error:
        free = shutil.disk_usage(place).free if place.exists() else 0
        raise DataError(f"cannot write under {place}: {error.strerror} ({free >> 20} MiB free)") from error


def _fetch_archive(archive: Archive, root: Path) -> Path:
    target, file = root / archive.target, root / archive.file
    if target.exists():
        return target
    # Two processes that fetch the same archive would write into one partial download: the second waits for the first
    # and then finds the data. The system releases the lock of a process that is killed.
    with FileLock(root / f".{archive.file}.lock"):
        if target.exists():
            return target
        kept = file.exists()
        if kept:
            verify_file(file, md5=archive.md5, sha256=archive.sha256)
        else:
            download(archive.url, file, md5=archive.md5, sha256=archive.sha256)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as scratch:
            extract(file, Path(scratch))
            inside = [*Path(scratch).glob(archive.creates), *Path(scratch).glob(f"*/{archive.creates}")]
            if not inside:
                raise DataError(f"{file} does not hold {archive.creates}")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(inside[0], target)
        if not kept:
            file.unlink()
    return target


def download(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    progress: Received | None = None,
    attempts: int = 5,
    timeout: float = 30.0,
    wait: float = 2.0,
) -> Path:
    """Download ``url`` to ``target``; nothing is at ``target`` before the whole file is there and checked.

    What has arrived is kept in ``target.part``; a later call, or the next attempt, asks the server for the rest.
    ``attempts`` connections in a row may bring nothing new; one that is silent for ``timeout`` seconds counts as lost,
    and the next one starts ``wait`` seconds later.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"can only download over http or https, not {url}")
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    left, have = attempts, _size(part)
    while (reason := _receive(url, part, progress, timeout)) is not None:
        left = attempts if _size(part) > have else left - 1
        have = _size(part)
        if left <= 0:
            raise DataError(f"download of {url} stopped: {reason}; {have} bytes are kept, run it again to continue")
        time.sleep(wait)
    try:
        verify_file(part, md5=md5, sha256=sha256)
    except DataError as error:
        part.unlink()
        raise DataError(f"{url}: {error}; the download was removed, try again") from error
    os.replace(part, target)
    return target


def verify_file(path: Path, *, md5: str | None = None, sha256: str | None = None) -> None:
    """Raise DataError unless the file has the given digests; digests not given are not checked."""
    for name, expected in (("md5", md5), ("sha256", sha256)):
        if expected is None:
            continue
        digest = hashlib.new(name, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise DataError(f"{path.name} has {name} {digest.hexdigest()}, expected {expected}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, part: Path, progress: Received | None, timeout: float) -> str | None:
    """One connection; None when the file is complete, else why it is not."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "infssm", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            have = have if resumed else 0
            length = response.headers.get("Content-Length")
            total = None if length is None else have + int(length)
            with part.open("ab" if resumed else "wb") as file:
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    have += len(chunk)
                    if progress is not None:
                        progress(have, total)
        return None if total in (None, have) else f"the connection was cut at {have} of {total} bytes"
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # more than the server has, or all of it: the digest of a fresh copy decides
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return None
            part.unlink()
            return "the server has less than was kept; starting anew"
        if error.code < 500:
            raise DataError(f"{url}: the server answers {error.code} {error.reason}") from error
        return f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", None) or error or type(error).__name__)


def extract(archive: Path, into: Path) -> None:
    """Unpack a tar (plain or compressed) or zip into the empty or new folder ``into``.

    Only regular files and folders are written, all below ``into``: absolute paths, ``..``, links and devices are
    refused with a DataError before anything of them is written. (tarfile's ``data`` filter would accept some links, is
    missing in older releases of Python 3.10 and 3.11, and does not exist for zip.)
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        require_regular(archive)
        for name, content in _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive):
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive or "\0" in name:
                raise DataError(f"{archive} holds {name!r}, which leads outside: refused")
            (into / path if content is None else (into / path).parent).mkdir(parents=True, exist_ok=True)
            if content is not None:
                with (into / path).open("wb") as file:
                    shutil.copyfileobj(content, file)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot unpack {archive}: {error}") from error
    except Exception as error:  # on damaged archives tarfile, zipfile and the decompressors raise almost anything
        raise DataError(f"{archive} is truncated or damaged ({error}): delete it and fetch it again") from error


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of each member; the content of a folder is None."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{archive} holds {member.name!r}, which is a link or a device: refused")
            yield member.name, tar.extractfile(member) if member.isreg() else None


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of each member; the content of a folder is None."""
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{archive} holds {member.filename!r}, which is a link or a device: refused")
            if member.is_dir():
                yield member.filename, None
            else:
                with zipped.open(member) as content:
                    yield member.filename, content


@dataclass(frozen=True)
class CheckReport:
    """How many classes and samples :func:`check` found, unreadable files with the reason, and all problems in words."""

    name: str
    root: Path
    classes: int = 0
    images: int = 0
    unreadable: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check(name: str, root: str | Path | None = None, *, progress: Progress | None = None) -> CheckReport:
    """Count classes and samples, read every file not read before, and report what is missing and where it was sought.

    ``name`` is a registered data set or your own, see :func:`~infssm.data.load_dataset`.
    """
    place = data_root(root)
    try:
        dataset = load_dataset(name, root)
    except DataError as error:
        return CheckReport(name, place, problems=(str(error),))
    problems = []
    if name in DATASETS:
        entry = DATASETS[name]
        pairs = (("classes", entry.classes, dataset.num_classes), ("images", entry.images, len(dataset)))
        problems = [
            f"{found} {what}, expected {wanted}" for what, wanted, found in pairs if wanted not in (None, found)
        ]
    paths = getattr(dataset.samples, "paths", ())
    unreadable = [(paths[number], reason) for number, reason in find_unreadable(dataset, progress).items()]
    if unreadable:
        problems.append(f"{len(unreadable)} files cannot be read, first {unreadable[0][0]}: {unreadable[0][1]}")
    return CheckReport(name, place, dataset.num_classes, len(dataset), tuple(unreadable), tuple(problems))
