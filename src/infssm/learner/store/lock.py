"""One process per run directory.

The operating system holds the lock, over NFS too, and lets go of it when the process dies; the file's text only tells
people who holds it. Where a file system knows no locks, that text decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infssm._files import explained
from infssm.errors import ConfigError
from infssm.learner.store import names

_FAR = 1 << 30
"""The byte that is locked: beyond the text, which stays readable where locks forbid reading."""
_TAKEN = (errno.EACCES, errno.EAGAIN, getattr(errno, "EDEADLOCK", errno.EDEADLK))
_here: set[Path] = set()
_guard = threading.Lock()


class InUseError(ConfigError):
    """Another process works in the run directory."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that works in ``folder``, which exists; InUseError where another one does."""
    path = folder.resolve() / names.LOCK
    with _guard:  # the system's lock belongs to the process: it does not tell two runs of one process apart
        if path in _here:
            raise InUseError(_refusal(folder, {"pid": os.getpid(), "host": socket.gethostname()}))
        _here.add(path)
    try:
        with explained(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _take(handle, folder)
            with explained(path):
                _write(handle, {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    _write(handle, None)
        finally:
            os.close(handle)
    finally:
        with _guard:
            _here.discard(path)


def _take(handle: int, folder: Path) -> None:
    try:
        _lock(handle)
    except OSError as error:
        holder = _read(handle)
        if error.errno in _TAKEN or _may_live(holder):
            raise InUseError(_refusal(folder, holder)) from None


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FAR, os.SEEK_SET)


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether the process that the file names may be alive, for file systems without locks."""
    if not holder:
        return False
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int) or sys.platform == "win32":
        return True  # nothing can be known; on Windows, signal 0 would end the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _read(handle: int) -> dict[str, Any]:
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        values = json.loads(os.read(handle, 4096))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(handle: int, holder: dict[str, Any] | None) -> None:
    os.ftruncate(handle, 0)
    if holder is not None:
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(holder).encode())


def _refusal(folder: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
    return (
        f"{folder} is in use by {who}: wait for it or stop it, then continue with `infssm resume {folder}` "
        f"(if that process is gone, delete {folder / names.LOCK})"
    )
