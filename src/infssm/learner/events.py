"""Events that a training run reports while it works, and the one object that can ask it to stop.

The loop calls its listener with these events, in the order in which things happen. Displays, executors and searches
listen; none of them steers the run by raising an error. To end a run, call :meth:`Control.stop`: the run
then saves a checkpoint after the current step and raises :class:`~infssm.learner.events.Interrupted`. All events are
plain values that can be sent to another process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

from infssm.errors import InfssmError


@dataclass(frozen=True)
class RunBegan:
    """Training starts: ``steps`` steps in all, of which ``done`` were finished before an interruption."""

    title: str
    steps: int
    done: int


@dataclass(frozen=True)
class TaskBegan:
    """Task ``task`` of ``num_tasks`` starts, or continues after an interruption."""

    task: int
    num_tasks: int
    epochs: int


@dataclass(frozen=True)
class StepDone:
    """``done`` steps of the run are finished. Reported about twice a second, since reading ``terms`` waits for the GPU.

    Attributes:
        done: steps finished, counted over the whole run.
        task: task of the step, from 0, of ``num_tasks``.
        num_tasks: tasks of the run.
        epoch: epoch of the step, from 0, of ``epochs``.
        epochs: epochs of the task.
        terms: weighted loss terms of the step, by name.
        images_per_s: training samples per second in this epoch so far, over all processes.
    """

    done: int
    task: int
    num_tasks: int
    epoch: int
    epochs: int
    terms: Mapping[str, float]
    images_per_s: float


@dataclass(frozen=True)
class EpochDone:
    """An epoch is finished; ``value`` is the measure on validation data, NaN if there are none."""

    task: int
    epoch: int
    value: float


@dataclass(frozen=True)
class TaskEnded:
    """A task is trained, tested and saved; ``average`` is the mean test value over all tasks so far (AA)."""

    task: int
    average: float


@dataclass(frozen=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class RunEnded:
    """The run is complete, interrupted or failed; nothing more is reported."""


Event: TypeAlias = RunBegan | TaskBegan | StepDone | EpochDone | TaskEnded | Note | RunEnded
Listener: TypeAlias = Callable[[Event], None]


class Control:
    """Asks a run to stop. The run reads :attr:`stopping` after every step and every task.

    Args:
        asked: called each time it is read; a true result stops the run. For requests that must be fetched, for
            instance from a pipe.
    """

    def __init__(self, asked: Callable[[], bool] | None = None) -> None:
        self._asked = asked
        self._stopped = False

    def stop(self) -> None:
        """Let the run save and end after the current step."""
        self._stopped = True

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stopped or (self._asked is not None and self._asked())


class Interrupted(InfssmError):
    """The run was asked to stop and has saved its progress."""

    exit_code = 130


@contextlib.contextmanager
def stop_on_signals(control: Control) -> Iterator[None]:
    """While entered, the first SIGINT or SIGTERM asks ``control`` to stop; a second one acts at once."""
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        control.stop()
        restore()

    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
