"""Progress of runs: live lines on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from infssm.learner.events import Event, Note, RunBegan, RunEnded, StepDone


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
