"""What a process that carries out a run tells the one that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infssm.learner.display import Display


@dataclass(frozen=True)
class Started:
    """A run of ``steps`` steps is under way, ``done`` of them finished earlier; its directory is open."""

    steps: int
    done: int


@dataclass(frozen=True)
class Stepped:
    """The run has done so many of its steps."""

    done: int
    where: str
    terms: Mapping[str, float]
    images_per_s: float


@dataclass(frozen=True)
class Noted:
    """Something to show."""

    text: str


@dataclass(frozen=True)
class TaskDone:
    """A task is over and saved."""

    task: int
    aa: float


@dataclass(frozen=True)
class Done:
    """The run is complete."""


@dataclass(frozen=True)
class Failed:
    """The run raised an error."""

    error: Exception


@dataclass(frozen=True)
class Died:
    """The process is gone, or was told by others to leave its run before the end."""

    reason: str


Message = Started | Stepped | Noted | TaskDone | Done | Failed | Died


def show(message: Message, display: Display) -> None:
    """Show a message here as the run would show itself."""
    if isinstance(message, Started):
        display.start("", message.steps, message.done)
    elif isinstance(message, Stepped):
        display.step(message.done, message.where, message.terms, message.images_per_s)
    elif isinstance(message, Noted):
        display.note(message.text)
