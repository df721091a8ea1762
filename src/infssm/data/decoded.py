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
    path = folder / f"{fingerprint}-{size}-{_VERSION}.images"
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
