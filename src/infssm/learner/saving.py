"""The progress of a run, and the checkpoints that it is saved in, which survive power cuts and full disks.

A checkpoint is a ``torch.save`` archive followed by a trailer with its length and SHA-256. It is written to a temporary
file, synced, and renamed over the old one, whose content stays on as ``<name>.previous`` until the next save.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import struct
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from infssm._files import atomic_file
from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.load import config_hash
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.setup import Setup

if TYPE_CHECKING:
    from infssm.learner.log import Log
    from infssm.learner.store.directory import RunDirectory

_MAGIC = b"infssm-1"
_TRAILER = struct.Struct("<Q32s8s")
_REMEDY = "restore it, or repeat the run with `infssm run ... --overwrite`"


def save_checkpoint(path: Path, state: dict[str, Any], *, keep_previous: bool = True) -> None:
    """Write ``state`` (tensors and plain values) to ``path`` atomically.

    Raises :class:`~infssm.errors.CheckpointError` when the disk refuses; what was there before is then untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            torch.save(state, file)
            file.flush()
            digest, length = hashlib.sha256(), file.tell()
            with open(file.name, "rb") as written:  # in pieces: a second copy of the model may not fit into memory
                while piece := written.read(1 << 20):
                    digest.update(piece)
            file.write(_TRAILER.pack(length, digest.digest(), _MAGIC))
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


def rng_state() -> dict[str, Any]:
    """Return the state of torch's, NumPy's and Python's generators as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": list(random.getstate()),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@dataclass
class Position:
    """The next thing to do: ``task``, ``epoch``, ``step`` in it; ``begun`` once ``begin_task`` was called.

    ``at`` counts steps over the whole run; ``best`` is the best epoch of the task so far (file, accuracy, epoch).
    """

    task: int = 0
    epoch: int = 0
    step: int = 0
    begun: bool = False
    at: int = 0
    best: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def known_task(self) -> int:
        """The last task whose classes the method knows."""
        return self.task if self.begun else max(self.task - 1, 0)


@dataclass
class Progress:
    """Everything that changes while a run works, but the method itself."""

    position: Position
    matrix: AccuracyMatrix
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Each loss term, added up over the epoch; on the device until the epoch ends, since reading would wait for it."""
    counts: Counter[str] = field(default_factory=Counter)
    """Steps of the epoch that had each loss term."""
    optimizer: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    """Set when the run continues inside an epoch."""
    clock: float = field(default_factory=time.monotonic)

    def next_task(self) -> None:
        """The task is over."""
        p = self.position
        self.position = Position(task=p.task + 1, at=p.at, seconds=p.seconds)
        self.optimizer = self.rng = None

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.position.epoch += 1
        self.position.step = 0
        self.rng = None
        self.sums, self.counts = {}, Counter()

    def tick(self) -> None:
        """Count the time since the last tick."""
        now = time.monotonic()
        self.position.seconds += now - self.clock
        self.clock = now


def save_progress(run: RunDirectory, setup: Setup, progress: Progress, log: Log) -> None:
    """Write the checkpoint ``last.ckpt``."""
    progress.tick()
    save_checkpoint(
        run.last_checkpoint,
        {
            "config": config_hash(setup.config),
            "seed": setup.config.seed,
            "split": setup.stream.split.hash,
            "position": asdict(progress.position),
            "matrix": json.dumps(progress.matrix.to_json()),
            "meter": {"sums": progress.sums, "steps": dict(progress.counts)},
            "module": setup.method.module.state_dict(),
            "method": setup.method.state_dict(),
            "optimizer": progress.optimizer,
            "rng": rng_state() if progress.position.step else None,
            "log": log.position,
            "log_digest": log.digest,
        },
    )


def check_belongs(saved: dict[str, Any], setup: Setup) -> None:
    """Refuse to continue a run under another configuration, seed or split."""
    mine = (config_hash(setup.config), setup.config.seed)
    theirs = (saved["config"], saved["seed"])
    if mine != theirs:
        raise ConfigError(
            f"the checkpoint was written with configuration {theirs[0]}, seed {theirs[1]}, not with {mine[0]}, seed "
            f"{mine[1]}: restore config.yaml, or start a new run"
        )
    setup.stream.split.verify(setup.stream.dataset, expected_hash=saved["split"])


def restore_progress(saved: dict[str, Any], setup: Setup) -> Progress:
    """Put method and module back to where the checkpoint was written."""
    load_method(saved, setup)
    progress = Progress(Position(**saved["position"]), AccuracyMatrix.from_json(json.loads(saved["matrix"])))
    progress.optimizer, progress.rng = saved["optimizer"], saved["rng"]
    device = setup.method.context.device
    progress.sums = {name: value.to(device) for name, value in saved["meter"]["sums"].items()}
    progress.counts = Counter(saved["meter"]["steps"])
    return progress


def save_best(path: Path, setup: Setup) -> None:
    """Write module and method as they are after the best epoch so far."""
    method = setup.method
    save_checkpoint(path, {"module": method.module.state_dict(), "method": method.state_dict()}, keep_previous=False)


def check_best(run: RunDirectory, progress: Progress) -> None:
    """Raise now, not at the end of the task, if the best epoch so far cannot be read."""
    if progress.position.best is not None:
        try:
            load_checkpoint(run.checkpoints / progress.position.best["file"])
        except CheckpointError as error:
            raise CheckpointError(f"{error}; restore it, or repeat the run with --overwrite") from None


def load_method(saved: dict[str, Any], setup: Setup) -> None:
    """Restore module and method from a checkpoint."""
    try:
        setup.method.load_state_dict(saved["method"])
        setup.method.module.load_state_dict(saved["module"])
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not fit this model and method: {error}") from error
