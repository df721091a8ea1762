"""One process per run directory.

The operating system holds the lock, over NFS too, and releases it when the process dies; the text of the file only
tells people who holds it. On a file system without locks, the existence of a second file decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from infssm._files import explained
from infssm.errors import ConfigError
from infssm.learner.store import layout

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUseError(ConfigError):
    """Another process works in the run directory."""


@contextlib.contextmanager
def locked(folder: Path, then: str | None = None) -> Iterator[None]:
    """Be the only process that works in ``folder``, which exists; InUseError where another one does.

    ``then`` is what to do once that process is done; a run is resumed by default.
    """
    path = folder.resolve() / layout.LOCK
    lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False)
    with contextlib.ExitStack() as stack:
        try:
            try:
                stack.enter_context(lock)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                stack.enter_context(SoftFileLock(path.with_suffix(".held"), timeout=0, thread_local=False))
        except Timeout as refusal:
            then, holder = then or f"continue with `infssm resume {folder}`", "another process"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                values = json.loads(path.read_text())
                holder = f"process {values['pid']} on {values['host']}"
            raise InUseError(
                f"{folder} is in use by {holder}: wait for it or stop it, then {then} (if that process is gone, "
                f"delete {refusal.lock_file})"
            ) from None
        except OSError as error:
            with explained(path):
                raise error from None
        with contextlib.suppress(OSError):  # Windows forbids writing to a locked file
            path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.write_text("")
