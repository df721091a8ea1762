"""Checkpoints that survive power cuts, full disks and half-written files.

A checkpoint is a ``torch.save`` archive followed by a trailer with its length and SHA-256. It is written to a temporary
file, synced, and renamed over the old one, whose content stays on as ``<name>.previous`` until the next save.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from infssm._files import atomic_file
from infssm.errors import CheckpointError

_MAGIC = b"infssm-1"
_TRAILER = struct.Struct("<Q32s8s")
_REMEDY = "restore it, or repeat the run with `infssm run ... --overwrite`"


class _Hashing(io.RawIOBase):
    """A write-only file that hashes what passes through, so that saving needs no second copy in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.length += len(view)
        return len(view)


def save_checkpoint(path: Path, state: dict[str, Any], *, keep_previous: bool = True) -> None:
    """Write ``state`` (tensors and plain values) to ``path`` atomically.

    Raises :class:`~infssm.errors.CheckpointError` when the disk refuses; what was there before is then untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            hashing = _Hashing(file)
            torch.save(state, cast("IO[bytes]", hashing))
            file.write(_TRAILER.pack(hashing.length, hashing.digest.digest(), _MAGIC))
            if keep_previous and path.exists():
                _link(path, previous(path))
    except (OSError, RuntimeError) as error:
        # torch reports a writer that failed as a RuntimeError, with the OSError as its cause.
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
        if not isinstance(cause, OSError):
            raise
        kept = f"; the last good one is {path}" if path.exists() else ""
        raise CheckpointError(
            f"cannot save the checkpoint {path}: {cause.strerror or cause}{kept}. Free some space, then resume the run"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, all tensors on the CPU. Truncated or altered files are refused."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    body = memoryview(content)[: -_TRAILER.size]
    length, digest, magic = _TRAILER.unpack(content[-_TRAILER.size :].rjust(_TRAILER.size, b"\0"))
    if magic != _MAGIC or length != len(body):
        raise CheckpointError(f"the checkpoint {path} is truncated or not a checkpoint ({len(content)} bytes)")
    if hashlib.sha256(body).digest() != digest:
        raise CheckpointError(f"the checkpoint {path} is damaged: its checksum does not match its content")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"the checkpoint {path} holds more than tensors and plain values; not loaded") from None
    return state


def load_newest(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read ``path``, or ``<path>.previous`` where ``path`` is missing or damaged.

    Returns the state and, where the previous one had to serve, a message that says why.
    """
    try:
        return load_checkpoint(path), None
    except CheckpointError as error:
        older = previous(path)
        if not older.exists():
            raise CheckpointError(f"{error}; {_REMEDY}") from None
        try:
            return load_checkpoint(older), f"{error}; using the previous one, {older.name}"
        except CheckpointError as second:
            raise CheckpointError(f"{error}; {second}; {_REMEDY}") from None


def previous(path: Path) -> Path:
    """Where the checkpoint before ``path`` is kept."""
    return path.with_name(f"{path.name}.previous")


def _link(path: Path, other: Path) -> None:
    """Make ``other`` a second name of ``path``'s content, so that no moment is without a whole checkpoint."""
    temporary = other.with_name(f".{other.name}.{os.getpid()}.writing")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # a file system without hard links: a rename keeps the content just as whole
        os.replace(path, other)
    else:
        os.replace(temporary, other)
