"""In a process that carries out runs for another one: the run, and what is told of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Protocol

from infssm._user_code import import_files_of_parent
from infssm.bench.executors.executor import StoppedError
from infssm.bench.executors.messages import Died, Done, Failed, Message
from infssm.bench.experiment import Experiment
from infssm.bench.running import run
from infssm.errors import InfssmError
from infssm.learner.events import Control, Event, TaskEnded
from infssm.learner.signals import Interrupted
from infssm.learner.store.lock import InUseError

_PATIENCE = 60.0
"""Seconds to wait for a process that still saves the run: the one before, whose starter was killed."""


class Line(Protocol):
    """The way to the process that started this one."""

    def tell(self, message: Message) -> None:
        """Send a message."""

    def asked_to_stop(self) -> bool:
        """Whether the other side wants the run saved and left, or is gone."""

    def answer(self) -> bool:
        """Wait for the answer to the last message: whether to go on."""


class Reporter:
    """Listens to a run and tells another process of it, which can end the run.

    Args:
        line: the way to the other process.
        asks: whether to wait after each task for the word to go on.
        send: sends the files of the run; called when a task has ended, before the other process is told.
    """

    def __init__(self, line: Line, *, asks: bool, send: Callable[[], None] = lambda: None) -> None:
        self._line, self._asks, self._send = line, asks, send
        self.control = Control(line.asked_to_stop)
        self.stopped_after: int | None = None
        """The task after which the other process ended the run, if it did."""

    def __call__(self, event: Event) -> None:
        """Tell of an event."""
        if isinstance(event, TaskEnded):
            self._send()
        self._line.tell(event)
        if isinstance(event, TaskEnded) and self._asks and not self._line.answer():
            self.stopped_after = event.task
            self.control.stop()


def carry_out(experiment: Experiment, reporter: Reporter, *, overwrite: bool) -> Done | Failed | Died:
    """Carry out an experiment; how it ended."""
    import_files_of_parent()
    patience = time.monotonic() + _PATIENCE
    while isinstance(end := _attempt(experiment, reporter, overwrite), InUseError):
        if time.monotonic() > patience or reporter.control.stopping:
            return Failed(end)
        time.sleep(0.5)
    return end


def _attempt(experiment: Experiment, reporter: Reporter, overwrite: bool) -> Done | Failed | Died | InUseError:
    try:
        run(experiment, overwrite=overwrite, quiet=True, listen=reporter, control=reporter.control)
    except InUseError as error:
        return error
    except Interrupted:
        if reporter.stopped_after is not None:
            return Failed(StoppedError(f"stopped after task {reporter.stopped_after}"))
        return Died("it was told to stop")
    except InfssmError as error:
        return Failed(error)
    except Exception:
        return Failed(RuntimeError(traceback.format_exc()))
    return Done()
