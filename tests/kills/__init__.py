"""Random SIGKILLs of processes that change a learner: the folder opens, at the version before or after, unharmed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from infssm.learner.learner import Learner
from infssm.learner.predict import Prediction
from infssm.learner.store.versions import Versions
from tests.learner.frozen import digits, frozen

PRELOADED = ["tests.kills", "tests.learner.frozen", "lightning_fabric", "sklearn.datasets"]
PATIENCE = 120
"""Seconds after which a process counts as hung."""
Change = tuple[str, tuple[Any, ...]]


def run(count: int, seed: int) -> Counter[str]:
    """Kill ``count`` processes, half of them between two writes; what was found, by change and outcome.

    A process that ends before it could be killed does not count. AssertionError where a folder does not open, where its
    predictions are not those of a version, or where anything is left of a class that it has forgotten.
    """
    rng, found = np.random.default_rng(seed), Counter[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as place:
        folder, twin = Path(place) / "learner", Path(place) / "twin"
        learner = frozen(folder=folder)
        for classes in ((0, 1, 2), (3,)):
            learner.learn(*digits(*classes))
        while sum(found.values()) < count:
            change, before = _next(learner, rng), _said(learner)
            shutil.rmtree(twin, ignore_errors=True)
            shutil.copytree(folder, twin)
            started = time.monotonic()
            with _counted_writes() as writes:
                apply(twin, change)  # what the process would do
            seconds, after = time.monotonic() - started, _said(Learner.load(twin))
            at = int(rng.integers(1, len(writes) + 1)) if rng.random() < 0.5 else None
            killed = _kill(context, folder, change, at, float(rng.uniform(0, seconds)))
            learner = Learner.load(folder)
            said = _said(learner)
            moment = "at any time" if at is None else "between two writes"
            assert said in (before, after), f"{change[0]}, killed {moment}: version {learner.version} says other things"
            if change[0] == "forget" and said == after:
                _check_forgotten(folder, *change[1])
            if killed:
                found[f"{change[0]}, killed {moment}: version {'before' if said == before else 'after'}"] += 1
    return found


def apply(folder: Path, change: Change, started: Connection | None = None, at: int | None = None) -> None:
    """Open a learner and change it; tell ``started`` before that, and die before the write number ``at``."""
    torch.set_num_threads(1)
    learner, (name, arguments) = Learner.load(folder), change
    with _counted_writes(at):
        if started is not None:
            started.send(True)
        getattr(learner, name)(*arguments)


@contextlib.contextmanager
def _counted_writes(at: int | None = None) -> Iterator[list[str]]:
    """Note every call that changes a folder; SIGKILL this process before number ``at``."""
    calls: list[str] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(original.__name__)
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        yield calls


def _next(learner: Learner, rng: np.random.Generator) -> Change:
    """A change that the learner can make, such that it never knows all digits or fewer than three."""
    known, version = list(learner.classes), learner._now.parent
    names = ["learn"] * (len(known) < 8) + ["forget"] * (len(known) > 3) + ["undo"] * bool(version)
    name = str(rng.choice(names))
    if name == "learn":
        return name, digits(int(rng.integers(10)), count=4, skip=int(rng.integers(100)))
    return name, (str(rng.choice(known)),) if name == "forget" else ()


def _kill(context: Any, folder: Path, change: Change, at: int | None, seconds: float) -> bool:
    """Whether a process died before write ``at``, or, where that is None, was killed some seconds after it started."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=apply, args=(folder, change, theirs, at), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE)
    process.join(seconds if at is None else PATIENCE)
    process.kill()
    process.join(PATIENCE)
    code = process.exitcode
    process.close()
    ours.close()
    assert code in (0, -signal.SIGKILL), f"{change[0]} ended with exit code {code}"
    return bool(code)


def _check_forgotten(folder: Path, name: str) -> None:
    """Raise where a folder that was opened again holds more than its current version, or the name of a class."""
    number = Versions(folder).current
    own = {"lock", "learner.json", f"versions/{number:06}.json", f"tensors/{number:06}.safetensors"}
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == own, f"after forgetting there are {sorted(files)}"
    assert not [file for file, content in files.items() if name.encode() in content]


def _said(learner: Learner) -> list[Prediction]:
    return learner.predict(list(digits(*range(10), count=1, skip=150)[0]))
