"""What a run shows while it works: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


class Display:
    """Base: shows nothing. Steps are counted over the whole run, so the remaining time is that of the run."""

    stopping = False
    """Whether whoever looks on wants the run to save and leave, as after Ctrl-C."""

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A run of ``steps`` steps begins, ``done`` of them finished earlier."""

    def step(self, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        """One step is done; ``terms`` are recent loss terms."""

    def task_done(self, task: int, aa: float) -> None:
        """A task is over and saved; ``aa`` is the average accuracy after it. An error raised here ends the run."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def stop(self) -> None:
        """The run is over or interrupted."""


class PlainDisplay(Display):
    """One line per event, and at most one line of progress every ``every`` seconds."""

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """See :class:`Display`."""
        self._title, self._steps, self._done, self._first = title, steps, done, done
        self._begun = self._last = time.monotonic()
        self.note(f"{title}: {steps} steps" if not done else f"{title}: continuing at step {done} of {steps}")

    def step(self, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        """See :class:`Display`."""
        self._done += 1
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        left = (now - self._begun) / (self._done - self._first) * (self._steps - self._done)
        self.note(
            f"{self._title}: {where}, step {self._done}/{self._steps}, {format_terms(terms)}, "
            f"{images_per_s:,.0f} images/s, {left:.0f} s left"
        )

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        print(text, file=self._stream, flush=True)


class RichDisplay(Display):
    """A live progress line at the foot of the terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._bar: Any = None
        self._title = ""

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """See :class:`Display`."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._title = title
        self._progress = Progress(
            TextColumn("[bold]{task.fields[title]}[/] {task.fields[where]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[speed]:,.0f} images/s  {task.fields[terms]}[/]"),
            console=self._console,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=steps, completed=done, title=title, where="", speed=0.0, terms="")
        self._progress.start()

    def step(self, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        """See :class:`Display`."""
        if self._progress is not None:
            self._progress.update(self._bar, advance=1, where=where, speed=images_per_s, terms=format_terms(terms))

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """See :class:`Display`."""
        if self._progress is not None:
            self._progress.stop()


def choose_display(quiet: bool = False) -> Display:
    """A live display on a terminal, lines in a pipe or without rich, nothing when quiet."""
    if quiet:
        return Display()
    if sys.stderr.isatty():
        try:
            return RichDisplay()
        except ImportError:
            pass
    return PlainDisplay()


def format_terms(terms: Mapping[str, float]) -> str:
    """``"ce 0.412  inf-ssm-exact/distance 0.051"``."""
    return "  ".join(f"{name} {value:.3g}" for name, value in terms.items())
