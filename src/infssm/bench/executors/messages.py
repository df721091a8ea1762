"""What a process that carries out a run tells the one that started it: the events of the run, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from infssm.learner.events import Event


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


Message = Event | Done | Failed | Died
