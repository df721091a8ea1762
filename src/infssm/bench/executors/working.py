"""In a process that carries out runs for another one: the run, and what is told of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from infssm._user_code import import_files_of_parent
from infssm.bench.executors.job import StoppedError
from infssm.bench.executors.messages import Died, Done, Failed, Message, Noted, Started, Stepped, TaskDone
from infssm.bench.experiment import Experiment
from infssm.bench.running import run
from infssm.errors import InfssmError
from infssm.learner.display import Display
from infssm.learner.signals import Interrupted
from infssm.learner.store.lock import InUseError

_OFTEN = 0.25
"""Seconds between two messages about steps."""
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


class TellingDisplay(Display):
    """Tells another process what there is to show."""

    def __init__(self, line: Line, *, asks: bool, send: Callable[[], None] = lambda: None) -> None:
        """``asks``: wait after each task for the word to go on. ``send``: sends the files of the run before that."""
        self._line, self._asks, self._send = line, asks, send
        self._told = 0.0

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        """See :class:`Display`."""
        return self._line.asked_to_stop()

    def start(self, title: str, steps: int, done: int = 0) -> None:  # noqa: ARG002 - the other side has names
        """See :class:`Display`."""
        self._line.tell(Started(steps, done))

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        """See :class:`Display`."""
        now = time.monotonic()
        if now - self._told >= _OFTEN:
            self._told = now
            self._line.tell(Stepped(done, where, dict(terms), images_per_s))

    def task_done(self, task: int, aa: float) -> None:
        """See :class:`Display`."""
        self._send()
        self._line.tell(TaskDone(task, aa))
        if self._asks and not self._line.answer():
            raise StoppedError(f"stopped after task {task}")

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._line.tell(Noted(text))


def carry_out(experiment: Experiment, display: TellingDisplay, *, overwrite: bool) -> Done | Failed | Died:
    """Carry out an experiment; how it ended."""
    import_files_of_parent()
    patience = time.monotonic() + _PATIENCE
    while isinstance(end := _attempt(experiment, display, overwrite), InUseError):
        if time.monotonic() > patience or display.stopping:
            return Failed(end)
        time.sleep(0.5)
    return end


def _attempt(experiment: Experiment, display: TellingDisplay, overwrite: bool) -> Done | Failed | Died | InUseError:
    try:
        run(experiment, overwrite=overwrite, quiet=True, display=display)
    except InUseError as error:
        return error
    except Interrupted:
        return Died("it was told to stop")
    except InfssmError as error:
        return Failed(error)
    except Exception:
        return Failed(RuntimeError(traceback.format_exc()))
    return Done()
