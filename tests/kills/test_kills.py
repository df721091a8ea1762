"""A few random kills; ``python -m tests.kills`` makes hundreds."""

import contextlib
import multiprocessing
from pathlib import Path

from infssm.learner.learner import Learner
from infssm.learner.store.layout import InUseError
from tests.kills import PATIENCE, PRELOADED, run
from tests.learner.frozen import digits, frozen


def test_a_killed_process_leaves_a_version() -> None:
    assert sum(run(4, seed=1).values()) == 4


def teach(folder: Path, classes: tuple[int, ...]) -> None:
    """Teach classes one by one, again and again where another process is at work."""
    learner, rest = Learner.load(folder), list(classes)
    while rest:
        with contextlib.suppress(InUseError):
            learner.learn(*digits(rest[0], count=4))
            del rest[0]


def test_two_processes_that_teach_at_once_lose_nothing(tmp_path: Path) -> None:
    frozen(folder=tmp_path / "learner").learn(*digits(0, 1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=teach, args=(tmp_path / "learner", c)) for c in ((2, 3, 4), (5, 6, 7))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    learner = Learner.load(tmp_path / "learner")
    assert sorted(learner.classes) == [f"digit {c}" for c in range(8)]
    assert (learner.version, len(learner.history)) == (7, 7)
