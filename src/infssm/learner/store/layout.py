"""The files of a run directory: their names, ``run.json``, which holds their checksums, and the lock.

Files with other names are never touched. A checksum is written before the file it belongs to, beside the one of the
content that is replaced. So a process may be killed at any moment: what lies there is always one of the two.
Checkpoints (``*.ckpt``) and ``split.json`` carry checksums of their own, and ``config.yaml`` has one over the settings
that count, so that folders may be moved.

One process works in a directory. The operating system holds the lock, over NFS too, and releases it when the process
dies; the text of the file only tells people who holds it. On a file system without locks, the existence of a second
file decides.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from infssm._files import explained, write_text
from infssm.errors import ConfigError, DataError

FORMAT = 1
"""Version of the run directory's layout."""
MARKER = "run.json"
LOCK = "lock"
CONFIG = "config.yaml"
ENV = "env.json"
SPLIT = "split.json"
STREAM = "stream.json"
METRICS = "metrics.jsonl"
MATRIX = "accuracy_matrix.csv"
CONFUSION = "confusion.json"
RESULT = "result.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
TASK0 = "task0"
"""Folder of a benchmark in which the models after task 0 are that its runs share."""
LAST = f"{CHECKPOINTS}/last.ckpt"

REMEDY = "restore it, or delete it if you can do without"
"""The way out where one of a run's files is damaged."""

_FILES = (MARKER, CONFIG, ENV, SPLIT, STREAM, METRICS, MATRIX, CONFUSION, RESULT, REPORT, "mlflow.txt")
_CHECKPOINT = r"last\.ckpt(\.previous|\.damaged)?|best_\d{2,}_\d{3,}\.ckpt|task_\d{2,}\.safetensors"
_NAME = "|".join([*map(re.escape, _FILES), _CHECKPOINT])
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, _FILES))})"
    rf"|{CHECKPOINTS}/({_CHECKPOINT})"
    rf"|({CHECKPOINTS}/)?\.({_NAME})\.(\d+\.)?writing"
    r"|tensorboard/events\.out\.tfevents\.[^/]+"
)
_WEIGHTS = re.compile(r"task_(\d{2,})\.safetensors")
_BEST = re.compile(r"best_\d{2,}_\d{3,}\.ckpt")


def weights_name(task: int) -> str:
    """The model after a task, below the run directory."""
    return f"{CHECKPOINTS}/task_{task:02}.safetensors"


def tasks_of(files: Iterable[str]) -> list[int]:
    """Tasks whose models are among files, in order."""
    return sorted([int(match[1]) for name in files if (match := _WEIGHTS.fullmatch(name.rpartition("/")[2]))])


def best_files(folder: Path) -> list[Path]:
    """Checkpoints of best epochs in a run directory."""
    return [path for path in (folder / CHECKPOINTS).glob("best_*") if _BEST.fullmatch(path.name)]


def our_files(folder: Path) -> list[Path]:
    """Files of a folder that are named like files of a run, except the lock."""
    found = [*folder.glob("*"), *folder.glob(f"{CHECKPOINTS}/*"), *folder.glob("tensorboard/*")]
    files = [path for path in found if path.is_symlink() or not path.is_dir()]
    return sorted(path for path in files if _OURS.fullmatch(path.relative_to(folder).as_posix()))


def is_ours(name: str) -> bool:
    """Whether a path below a run directory is the name of a finished file of a run."""
    return _OURS.fullmatch(name) is not None and not name.endswith(".writing")


def is_unfinished_write(path: Path) -> bool:
    """Whether one of our files is a temporary one, left behind by a process that was killed."""
    return path.name.endswith(".writing")


_READ: dict[Path, tuple[tuple[int, ...], Manifest]] = {}
"""Manifests by file, with the version of the file: to load a run takes its manifest for each of its files."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``run.json``.

    Attributes:
        settings: digest of the settings that count, empty before there is a configuration.
        files: per file below the run directory, the digests its content may have: the newest first, at most two.
    """

    settings: str = ""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a run directory; an empty one if there is none."""
        path = folder / MARKER
        try:
            now = os.stat(path)
            version = (now.st_ino, now.st_mtime_ns, now.st_size)
            if (known := _READ.get(path)) is None or known[0] != version:
                values = json.loads(path.read_bytes())
                if values["format"] > FORMAT:
                    newer = f"format {values['format']}, not {FORMAT}"
                    raise DataError(f"{folder} is of a newer infssm ({newer}): update infssm")
                manifest = cls(values["settings"], {name: tuple(found) for name, found in values["files"].items()})
                if values["checksum"] != manifest._checksum():
                    raise ValueError("checksum")
                known = _READ[path] = version, manifest
            return known[1]
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(
                f"{path} is damaged: restore it, or delete it to use the run without its checksums"
            ) from None

    def write(self, folder: Path) -> None:
        """Write ``run.json``."""
        values = {"format": FORMAT, "settings": self.settings, "files": self.files, "checksum": self._checksum()}
        write_text(folder / MARKER, json.dumps(values, indent=2) + "\n")

    def _checksum(self) -> str:
        text = json.dumps([self.settings, self.files], sort_keys=True)
        return digest_of(text.encode())

    def expecting(self, name: str, digest: str) -> Manifest:
        """The manifest that also takes ``digest`` for the file ``name``, which is about to be written."""
        before = [known for known in self.files.get(name, ()) if known != digest]
        return replace(self, files={**self.files, name: (digest, *before[:1])})

    def check(self, folder: Path, name: str, content: bytes) -> None:
        """Raise unless ``content`` is what the run wrote to the file ``name``."""
        known = self.files.get(name)
        if known is not None and digest_of(content) not in known:
            raise DataError(f"{folder / name} is damaged: its checksum is not the one in {MARKER}; {REMEDY}")


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_checked(path: Path) -> bytes:
    """Content of a file; inside a run directory it is compared with the checksum that the run stored.

    Raises OSError if it cannot be read, DataError if it is not what the run wrote.
    """
    content = path.read_bytes()
    for folder in (path.parent, path.parent.parent):
        Manifest.read(folder).check(folder, path.relative_to(folder).as_posix(), content)
    return content


_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUseError(ConfigError):
    """The run directory is in use by another process."""


@contextlib.contextmanager
def locked(folder: Path, then: str | None = None, *, wait: bool = False) -> Iterator[None]:
    """Be the only process that works in ``folder``, which exists; InUseError where another one does.

    ``then`` is what to do once that process is done; a run is resumed by default. ``wait``: wait for it instead.
    """
    path, timeout = folder.resolve() / LOCK, -1 if wait else 0
    lock: BaseFileLock = FileLock(path, timeout=timeout, thread_local=False)
    with contextlib.ExitStack() as stack:
        try:
            try:
                stack.enter_context(lock)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                stack.enter_context(SoftFileLock(path.with_suffix(".held"), timeout=timeout, thread_local=False))
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
