"""What runs show while they work: live lines on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from infssm.learner.events import Event, Note, RunBegan, RunEnded, StepDone


class Display:
    """A listener that shows one run. Base: nothing. Steps are counted over the whole run, and so is the time left."""

    def __call__(self, event: Event) -> None:
        """Show an event of the run."""
        if isinstance(event, StepDone):
            where = f"task {event.task + 1}/{event.num_tasks} epoch {event.epoch + 1}/{event.epochs}"
            self.step(event.done, where, event.terms, event.images_per_s)
        elif isinstance(event, RunBegan):
            self.start(event.title, event.steps, event.done)
        elif isinstance(event, Note):
            self.note(event.text)
        elif isinstance(event, RunEnded):
            self.stop()

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A run of ``steps`` steps begins, ``done`` of them finished earlier."""

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        """So many steps are done; ``terms`` are recent loss terms."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def stop(self) -> None:
        """The run is over or interrupted."""


class Screen:
    """Where any number of runs are shown. Base: nowhere."""

    def open(self, name: str | None = None) -> Display:  # noqa: ARG002
        """The display of one run; with a ``name``, that stands before all it says."""
        return Display()

    def note(self, text: str) -> None:
        """Say something that stays."""

    def stop(self) -> None:
        """All runs are over."""


class PlainScreen(Screen):
    """One line per event, and every ``every`` seconds at most a line of progress for each run at work."""

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every
        self._last = time.monotonic()
        self.lines: list[_PlainLine] = []

    def open(self, name: str | None = None) -> Display:
        """See :class:`Screen`."""
        return _PlainLine(self, name)

    def note(self, text: str) -> None:
        """See :class:`Screen`."""
        print(text, file=self._stream, flush=True)

    def progress(self) -> None:
        """Say where every run is, if it is time to."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            for line in self.lines:
                self.note(line.status)


class _PlainLine(Display):
    def __init__(self, screen: PlainScreen, name: str | None) -> None:
        self._screen, self._name = screen, name
        self.status = ""

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self.stop()  # a run starts twice where it trains the task-0 model first
        self._title, self._steps, self._first = self._name or title, steps, done
        self._begun = time.monotonic()
        self.status = f"{self._title}: " + (f"{steps} steps, {done} of them done" if done else f"{steps} steps")
        self._screen.lines.append(self)
        self._screen.note(self.status)

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        left = (time.monotonic() - self._begun) / max(done - self._first, 1) * (self._steps - done)
        self.status = (
            f"{self._title}: {where}, step {done}/{self._steps}, {format_terms(terms)}, {images_per_s:,.0f} images/s, "
            f"{left:.0f} s left"
        )
        self._screen.progress()

    def note(self, text: str) -> None:
        self._screen.note(_named(self._name, text))

    def stop(self) -> None:
        if self in self._screen.lines:
            self._screen.lines.remove(self)


class LiveScreen(Screen):
    """A live line per run at the foot of the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("[bold]{task.description}[/] {task.fields[where]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]:,.0f} images/s  {task.fields[terms]}", style="dim", markup=False),
            console=self._console,
            transient=True,
        )

    def open(self, name: str | None = None) -> Display:
        """See :class:`Screen`."""
        return _LiveLine(self, name)

    def note(self, text: str) -> None:
        """See :class:`Screen`."""
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`Screen`."""
        self.bars.stop()


class _LiveLine(Display):
    def __init__(self, screen: LiveScreen, name: str | None) -> None:
        self._screen, self._name = screen, name
        self._bar: Any = None

    def start(self, title: str, steps: int, done: int = 0) -> None:
        from rich.markup import escape

        bars = self._screen.bars
        if self._bar is not None:  # a run starts twice where it trains the task-0 model first
            bars.remove_task(self._bar)
        shown = escape(self._name or title)
        self._bar = bars.add_task(shown, total=steps, completed=done, where="", speed=0.0, terms="")
        bars.start()

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        shown = format_terms(terms)
        self._screen.bars.update(self._bar, completed=done, where=where, speed=images_per_s, terms=shown)

    def note(self, text: str) -> None:
        self._screen.note(_named(self._name, text))

    def stop(self) -> None:
        if self._bar is not None:
            self._screen.bars.remove_task(self._bar)
            self._bar = None
        if not self._screen.bars.tasks:
            self._screen.stop()


def choose_screen(quiet: bool = False) -> Screen:
    """A live one on a terminal, plain lines in a pipe or without rich, nothing when quiet."""
    if quiet:
        return Screen()
    if sys.stderr.isatty():
        try:
            return LiveScreen()
        except ImportError:
            pass
    return PlainScreen()


def _named(name: str | None, text: str) -> str:
    return text if name is None else f"{name}: {text}"


def format_terms(terms: Mapping[str, float]) -> str:
    """``"ce 0.412  inf-ssm-exact/distance 0.051"``."""
    return "  ".join(f"{name} {value:.3g}" for name, value in terms.items())
