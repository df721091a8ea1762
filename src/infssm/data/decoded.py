"""Decoded images kept in one file under the cache root: read once, resized once, for all epochs and all runs."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infssm.data.files import cache_root

_VERSION = 2
"""Changes whenever the same file is decoded to other pixels."""
_LARGEST = 4 << 30
"""Bytes of the largest store; images that would take more are decoded each time."""
_ALTOGETHER = 8 << 30
"""Bytes of all stores; the least recently used one is removed first."""


class DecodedStore:
    """uint8 [3, size, size] of every file of a list, filled as they are decoded, by any number of processes.

    Every image has a checksum before it, 0 where there is none yet, so half-written and damaged entries are decoded
    again. Where the disk is full or cannot be written, nothing is kept.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._bytes = 3 * size * size
        self._file: int | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None}

    def get(self, index: int) -> Tensor | None:
        """Image ``index``, uint8 [3, size, size]; None where it is not there."""
        file = self._open()
        if file is None:
            return None
        entry = os.pread(file, 4 + self._bytes, index * (4 + self._bytes))
        if len(entry) < 4 + self._bytes or _checksum(entry[4:]) != entry[:4]:
            return None
        return torch.frombuffer(bytearray(entry), dtype=torch.uint8, offset=4).view(3, self.size, self.size)

    def put(self, index: int, raw: Tensor) -> None:
        """Keep image ``index``, uint8 [3, size, size]."""
        file = self._open()
        if file is None:
            return
        content = np.ascontiguousarray(raw.numpy()).tobytes()
        with contextlib.suppress(OSError):
            os.pwrite(file, _checksum(content) + content, index * (4 + self._bytes))

    def _open(self) -> int | None:
        if self._file is None:
            try:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                os.utime(self._file)
            except OSError:
                return None
        return self._file

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def open_store(fingerprint: str, count: int, size: int) -> DecodedStore | None:
    """The store of ``count`` images with this fingerprint; None where it would be too large or cannot be written."""
    needed = count * (4 + 3 * size * size)
    if needed > _LARGEST:
        return None
    folder = cache_root() / "decoded"
    store = folder / f"{fingerprint}-{size}-{_VERSION}.images"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not store.exists():
            _make_room(folder, needed)
    except OSError:
        return None
    return DecodedStore(store, size)


def _make_room(folder: Path, needed: int) -> None:
    """Remove stores, the one not used for longest first, until another fits."""
    found = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.glob("*.images"))
    used = sum(size for _, size, _ in found)
    for _, size, file in found:
        if used + needed <= _ALTOGETHER:
            return
        file.unlink(missing_ok=True)
        used -= size


def _checksum(content: bytes) -> bytes:
    """Four bytes that are never all 0."""
    return (zlib.crc32(content) or 1).to_bytes(4, "little")
