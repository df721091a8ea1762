"""Files of data sets: where they are kept, how they are listed, how a changed one is noticed, and decoded images."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from infssm._files import atomic_file
from infssm.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the number of files read so far and the number of files to read."""

_VERSION = 2
_Known = tuple[int, int, str, bool]
"""Size, time of change, digest and whether it could be read: known as long as size and time of a file do not change."""


def data_root(root: str | Path | None = None) -> Path:
    """The folder that holds data sets: ``root``, else ``$INFSSM_DATA``, else ``~/.cache/infssm/data``."""
    return Path(os.path.expanduser(root or os.environ.get("INFSSM_DATA") or "~/.cache/infssm/data"))


def cache_root() -> Path:
    """The folder for everything that can be computed again: ``$INFSSM_CACHE``, else ``~/.cache/infssm``."""
    return Path(os.environ.get("INFSSM_CACHE") or "~/.cache/infssm").expanduser()


def require_regular(path: Path) -> int:
    """The size of a regular file in bytes; OSError for anything else.

    Readers call this before they open a path, because opening a pipe or a device can block for ever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return status.st_size


def scan(folder: Path) -> tuple[list[str], list[str]]:
    """Sorted names of the folders and of the files in a folder; pipes and devices are left out with a warning.

    A folder that cannot be listed, and a name that is not UTF-8, is a DataError: leaving either out would change the
    data without notice. A broken link counts as a file, so that the file is named when it cannot be read.
    """
    folders, files, special = [], [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.is_file() or not os.path.exists(entry.path):
                    files.append(entry.name)
                else:
                    special.append(entry.name)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot list the folder {folder}: {reason}; make it readable or move it away") from error
    for name in (*folders, *files):
        if not name.isascii() and name != name.encode(errors="replace").decode():
            raise DataError(f"{folder} holds the name {os.fsencode(name)!r}, which is not UTF-8: rename it")
    if special:
        warnings.warn(f"{folder}: left out, not regular files: {shown(special)}", UserWarning, stacklevel=2)
    return sorted(folders), sorted(files)


def walk(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Paths of all files below a folder, relative to it, with forward slashes.

    Links are followed, except to one of the folders they lie in.
    """
    folders, files = scan(folder)
    yield from files
    if folders:
        above |= {os.path.realpath(folder)}
    for name in folders:
        if os.path.realpath(folder / name) not in above:
            yield from (f"{name}/{path}" for path in walk(folder / name, above))


def shown(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def digest(parts: Iterable[str | bytes | memoryview]) -> str:
    """The first 16 hexadecimal digits of the sha256 of some parts, one after the other."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Files(ABC):
    """Samples that are files below the folder ``root``; messages call one of them a ``word``.

    Paths are relative to ``root``, with forward slashes.
    """

    word: ClassVar[str]
    root: Path
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @abstractmethod
    def why_unreadable(self, index: int) -> str | None:
        """Why file ``index`` cannot be read; None when it can."""

    @cached_property
    def contents(self) -> dict[str, str]:
        """Digest of every file's bytes by path; empty for a file that cannot be opened.

        Digests are kept in the cache folder, so a file is read again only after its size or time of change differs.
        """
        known, marks = self._recall(), self._marks()
        new = [path for path in self.paths if known.get(path, ())[:2] != marks[path]]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing and reading release the interpreter's lock
            digests = list(pool.map(self._digest, new))
        if new:
            known |= {path: (*marks[path], digest, False) for path, digest in zip(new, digests, strict=True)}
            self._remember(known)
        return {path: known[path][2] for path in self.paths}

    def fingerprint(self) -> str:
        """Digest of the paths and the contents of all files."""
        return digest(f"{path}\0{content}\0" for path, content in self.contents.items())

    def unreadable(self, progress: Progress | None = None) -> dict[int, str]:
        """Index and reason of every file that cannot be read; files known to be readable are not read again."""
        contents, known, marks = self.contents, self._recall(), self._marks()
        expected: list[_Known] = [(*marks[path], contents[path], True) for path in self.paths]
        new = [n for n, path in enumerate(self.paths) if known.get(path) != expected[n]]
        bad: dict[int, str] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without holding the interpreter's lock
            for done, (number, reason) in enumerate(zip(new, pool.map(self.why_unreadable, new), strict=True), 1):
                if reason is not None:
                    bad[number] = reason
                if progress is not None:
                    progress(done, len(new))
        if len(new) > len(bad):
            self._remember(known | {self.paths[n]: expected[n] for n in new if n not in bad})
        return bad

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of every file."""
        marks = dict.fromkeys(self.paths, (-1, -1))
        for path in self.paths:
            with suppress(OSError):
                status = (self.root / path).stat()
                marks[path] = status.st_size, status.st_mtime_ns
        return marks

    def _digest(self, path: str) -> str:
        try:
            require_regular(self.root / path)
            with open(self.root / path, "rb") as file:
                return digest(iter(lambda: file.read(1 << 20), b""))
        except OSError:
            return ""

    @property
    def _cache(self) -> Path:
        return cache_root() / "files" / f"{digest([os.fsencode(self.root.resolve())])}.json"

    def _recall(self) -> dict[str, _Known]:
        """The stored content; nothing if it is missing, damaged or of another version."""
        try:
            stored = json.loads(self._cache.read_text(encoding="utf-8"))
            files = stored["files"].items() if stored["version"] == _VERSION else ()
            return {
                path: (int(size), int(changed), str(digest), bool(readable))
                for path, (size, changed, digest, readable) in files
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _remember(self, known: dict[str, _Known]) -> None:
        """Write the cache, completely or not at all; if it cannot be written, the files are read again next time."""
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._cache) as file:
                file.write(json.dumps({"version": _VERSION, "files": known}).encode())


_DECODED_VERSION = 2
"""Changes whenever the same file is decoded to other pixels."""
_LARGEST = 4 << 30
"""Bytes of the largest store; images that would take more are decoded each time."""
_TOTAL = 8 << 30
"""Bytes of all stores; the least recently used one is removed first."""


class DecodedStore:
    """uint8 [3, size, size] of every file of a list, filled as they are decoded, by any number of processes.

    Every image has a checksum before it, 0 if there is none yet, so half-written and damaged entries are decoded
    again. Where the disk is full or cannot be written, nothing is kept.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._bytes = 4 + 3 * size * size
        self._file: int | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None}

    def get(self, index: int) -> Tensor | None:
        """Image ``index``, uint8 [3, size, size]; None if it is not there."""
        file = self._open()
        entry = b"" if file is None else os.pread(file, self._bytes, index * self._bytes)
        if len(entry) < self._bytes or _checksum(entry[4:]) != entry[:4]:
            return None
        return torch.frombuffer(bytearray(entry), dtype=torch.uint8, offset=4).view(3, self.size, self.size)

    def put(self, index: int, raw: Tensor) -> None:
        """Keep image ``index``, uint8 [3, size, size]."""
        file, content = self._open(), np.ascontiguousarray(raw.numpy()).tobytes()
        if file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(file, _checksum(content) + content, index * self._bytes)

    def _open(self) -> int | None:
        if self._file is None:
            with contextlib.suppress(OSError):
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                os.utime(self._file)
        return self._file

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def open_store(fingerprint: str, count: int, size: int) -> DecodedStore | None:
    """The store of ``count`` images with this fingerprint; None if it would be too large or cannot be written."""
    needed = count * (4 + 3 * size * size)
    folder = cache_root() / "decoded"
    path = folder / f"{fingerprint}-{size}-{_DECODED_VERSION}.images"
    if needed > _LARGEST:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # remove stores, the one not used for longest first, until this one fits
            stores = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.glob("*.images"))
            used = sum(bytes_used for _, bytes_used, _ in stores)
            for _, bytes_used, file in stores:
                if used + needed > _TOTAL:
                    file.unlink(missing_ok=True)
                    used -= bytes_used
    except OSError:
        return None
    return DecodedStore(path, size)


def _checksum(content: bytes) -> bytes:
    """Four bytes that are never all 0."""
    return (zlib.crc32(content) or 1).to_bytes(4, "little")
