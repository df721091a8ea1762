"""One display for many runs: a line for each on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from infssm.executors._messages import Message, Noted, Started, Stepped
from infssm.train.display import format_terms


class ManyDisplay:
    """Base: shows nothing. Attempts at jobs are told apart by their numbers."""

    def begin(self, number: int, name: str) -> None:
        """An attempt begins."""

    def take(self, number: int, message: Message) -> None:
        """What its process told of it."""

    def end(self, number: int) -> None:
        """It is over."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def stop(self) -> None:
        """All is over."""


class PlainLines(ManyDisplay):
    """One line per event, and at most one line of progress for all every ``every`` seconds."""

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every
        self._last = time.monotonic()
        self._over = 0
        self._names: dict[int, str] = {}
        self._at: dict[int, str] = {}
        self._steps: dict[int, int] = {}

    def begin(self, number: int, name: str) -> None:
        """See :class:`ManyDisplay`."""
        self._names[number] = name

    def take(self, number: int, message: Message) -> None:
        """See :class:`ManyDisplay`."""
        name = self._names[number]
        if isinstance(message, Started):
            self._steps[number] = message.steps
            more = f"continuing at step {message.done} of {message.steps}" if message.done else f"{message.steps} steps"
            self.note(f"{name}: {more}")
        elif isinstance(message, Noted):
            self.note(f"{name}: {message.text}")
        elif isinstance(message, Stepped):
            self._at[number] = f"{name} {message.where}, step {message.done}/{self._steps.get(number, '?')}"
            if time.monotonic() - self._last >= self._every:
                self._last = time.monotonic()
                self.note(f"{self._over} runs over; " + "; ".join(self._at.values()))

    def end(self, number: int) -> None:
        """See :class:`ManyDisplay`."""
        self._over += 1
        self._at.pop(number, None)

    def note(self, text: str) -> None:
        """See :class:`ManyDisplay`."""
        print(text, file=self._stream, flush=True)


class LiveLines(ManyDisplay):
    """A live line per run at the foot of the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}[/] {task.fields[where]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[speed]:,.0f} images/s  {task.fields[terms]}[/]"),
            console=self._console,
            transient=True,
        )
        self._bars: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._progress.start()

    def begin(self, number: int, name: str) -> None:
        """See :class:`ManyDisplay`."""
        from rich.markup import escape

        self._names[number] = name
        self._bars[number] = self._progress.add_task(escape(name), total=None, where="", speed=0.0, terms="")

    def take(self, number: int, message: Message) -> None:
        """See :class:`ManyDisplay`."""
        bar = self._bars[number]
        if isinstance(message, Started):
            self._progress.update(bar, total=message.steps, completed=message.done)
        elif isinstance(message, Noted):
            self.note(f"{self._names[number]}: {message.text}")
        elif isinstance(message, Stepped):
            terms, speed = format_terms(message.terms), message.images_per_s
            self._progress.update(bar, completed=message.done, where=message.where, speed=speed, terms=terms)

    def end(self, number: int) -> None:
        """See :class:`ManyDisplay`."""
        self._progress.remove_task(self._bars.pop(number))

    def note(self, text: str) -> None:
        """See :class:`ManyDisplay`."""
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`ManyDisplay`."""
        self._progress.stop()


def choose_many_display(quiet: bool = False) -> ManyDisplay:
    """Live lines on a terminal, plain ones in a pipe or without rich, nothing when quiet."""
    if quiet:
        return ManyDisplay()
    if sys.stderr.isatty():
        try:
            return LiveLines()
        except ImportError:
            pass
    return PlainLines()
