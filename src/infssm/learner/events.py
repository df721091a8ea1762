"""What a training run reports while it works, how that is displayed, and the one object that can ask it to stop.

The loop calls its listener with these events, in the order in which things happen. Displays, executors and searches
listen; none of them steers the run by raising an error. To end a run, call :meth:`Control.stop`: the run
then saves a checkpoint after the current step and raises :class:`~infssm.learner.events.Interrupted`. All events are
plain values that can be sent to another process. On a terminal each run has a live line, elsewhere lines are plain.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
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

    Tasks and epochs count from 0. ``terms`` are the weighted loss terms of the step, ``images_per_s`` training samples
    per second in this epoch so far, over all processes.
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


class Screen:
    """Where any number of runs are shown: one line per event, and lines of progress now and then.

    Args:
        every: seconds, at least, between two reports of progress, a line for each active run.
        quiet: show nothing.
    """

    def __init__(self, every: float = 10.0, *, quiet: bool = False) -> None:
        self._every, self._quiet = every, quiet
        self._last = time.monotonic()
        self._lines: dict[Display, str] = {}

    def open(self, name: str | None = None) -> Display:
        """The display of one run; a ``name`` is put before each of its lines."""
        return Display(self, name)

    def start(self, run: Display) -> None:
        """Show a run that begins."""
        done = f", {run.done} of them done" if run.done else ""
        self._lines[run] = f"{run.title}: {run.steps} steps{done}"
        self.note(self._lines[run])

    def step(self, run: Display, event: StepDone) -> None:
        """Show how far a run is."""
        now = time.monotonic()
        left = (now - run.begun) / max(event.done - run.done, 1) * (run.steps - event.done)
        self._lines[run] = (
            f"{run.title}: {_where(event)}, step {event.done}/{run.steps}, {_terms(event)}, "
            f"{event.images_per_s:,.0f} images/s, {left:.0f} s left"
        )
        if now - self._last >= self._every:
            self._last = now
            for line in self._lines.values():
                self.note(line)

    def remove(self, run: Display) -> None:
        """Show a run no longer."""
        self._lines.pop(run, None)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def stop(self) -> None:
        """All runs are over."""


class Display:
    """A listener that shows one run on a screen.

    Attributes:
        title: name of the run.
        steps: steps of the whole run, which the progress and the time left refer to.
        done: steps finished before this part of the run began, at the time ``begun``.
    """

    title: str
    steps: int
    done: int
    begun: float

    def __init__(self, screen: Screen, name: str | None) -> None:
        self._screen, self._name = screen, name

    def __call__(self, event: Event) -> None:
        """Show an event of the run."""
        if isinstance(event, StepDone):
            self._screen.step(self, event)
        elif isinstance(event, RunBegan):
            self.stop()  # a run starts twice where it trains the task-0 model first
            self.title, self.steps, self.done = self._name or event.title, event.steps, event.done
            self.begun = time.monotonic()
            self._screen.start(self)
        elif isinstance(event, Note):
            self._screen.note(event.text if self._name is None else f"{self._name}: {event.text}")
        elif isinstance(event, RunEnded):
            self.stop()

    def stop(self) -> None:
        """Show the run no longer."""
        self._screen.remove(self)


class LiveScreen(Screen):
    """A live line per run at the foot of the terminal."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console  # optional: without rich, lines are plain
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            TextColumn("{task.fields[where]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]:,.0f} images/s  {task.fields[terms]}", style="dim", markup=False),
            console=self._console,
            transient=True,
        )
        self._bar_of: dict[Display, Any] = {}

    def start(self, run: Display) -> None:
        """See :class:`Screen`."""
        fields: dict[str, Any] = {"where": "", "speed": 0.0, "terms": ""}
        self._bar_of[run] = self.bars.add_task(run.title, total=run.steps, completed=run.done, **fields)
        self.bars.start()

    def step(self, run: Display, event: StepDone) -> None:
        """See :class:`Screen`."""
        fields: dict[str, Any] = {"where": _where(event), "speed": event.images_per_s, "terms": _terms(event)}
        self.bars.update(self._bar_of[run], completed=event.done, **fields)

    def remove(self, run: Display) -> None:
        """See :class:`Screen`."""
        if run in self._bar_of:
            self.bars.remove_task(self._bar_of.pop(run))
        if not self._bar_of:
            self.stop()

    def note(self, text: str) -> None:
        """See :class:`Screen`."""
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`Screen`."""
        self.bars.stop()


def choose_screen(quiet: bool = False) -> Screen:
    """A live one on a terminal, plain lines in a pipe or without rich, nothing when quiet."""
    if sys.stderr.isatty() and not quiet:
        with contextlib.suppress(ImportError):
            return LiveScreen()
    return Screen(quiet=quiet)


def _where(event: StepDone) -> str:
    return f"task {event.task + 1}/{event.num_tasks} epoch {event.epoch + 1}/{event.epochs}"


def _terms(event: StepDone) -> str:
    """``"ce 0.412  inf-ssm-exact/distance 0.051"``."""
    return "  ".join(f"{name} {value:.3g}" for name, value in event.terms.items())
