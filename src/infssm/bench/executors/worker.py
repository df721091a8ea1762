"""The protocol between a worker, a process that carries out one experiment, and the process that started it.

The worker sends the events of its run and, last, how the run ended. The other side answers after each task whether to
continue, if the worker asks, and sends None at any time to request that the run is saved and ended; a closed channel
means the same.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from infssm._user_code import import_files_of_parent
from infssm.bench.executors.executor import StoppedError
from infssm.bench.experiment import Experiment
from infssm.bench.running import run
from infssm.errors import InfssmError
from infssm.learner.events import Control, Event, Interrupted, TaskEnded
from infssm.learner.store.layout import InUseError

_PATIENCE = 60.0
"""Seconds to wait for a process that still saves the run: a worker of an earlier command that was killed."""


@dataclass(frozen=True)
class Order:
    """The order for a worker. ``asks``: whether it waits for an answer after each task."""

    experiment: Experiment
    overwrite: bool
    asks: bool


@dataclass(frozen=True)
class Done:
    """The run is complete."""


@dataclass(frozen=True)
class Failed:
    """The run raised an error."""

    error: Exception


@dataclass(frozen=True)
class Died:
    """The worker process ended, or stopped its run early on request."""

    reason: str


Message = Event | Done | Failed | Died


class Channel(Protocol):
    """The worker's end of the connection; ``multiprocessing.connection.Connection`` is one."""

    def send(self, message: Any, /) -> None:
        """Send a message; OSError if the other end is closed."""

    def poll(self) -> bool:
        """Whether :meth:`recv` would return, or raise, at once."""

    def recv(self) -> Any:
        """Wait for the next message; EOFError or OSError if none will come."""


class Reporter:
    """Listens to a run and forwards its events to the process that started the worker, which can end the run.

    ``send_files`` sends the files of the run; it is called at the end of a task, before the event is forwarded.
    """

    def __init__(self, channel: Channel, *, asks: bool, send_files: Callable[[], None] = lambda: None) -> None:
        self._channel, self._asks, self._send_files = channel, asks, send_files
        self._stopped = False
        self.control = Control(self._asked_to_stop)
        self.stopped_after: int | None = None
        """The task after which the other process ended the run, if it did."""

    def __call__(self, event: Event) -> None:
        """Forward an event."""
        if isinstance(event, TaskEnded):
            self._send_files()
        self.tell(event)
        if isinstance(event, TaskEnded) and self._asks and self.receive() is False:
            self.stopped_after = event.task
            self.control.stop()

    def tell(self, message: Any) -> None:
        """Send a message; if the other end is closed, the run must stop."""
        try:
            self._channel.send(message)
        except OSError:
            self._stopped = True

    def receive(self) -> Any:
        """Wait for the next message; None if the run must stop."""
        if self._stopped:
            return None
        try:
            received = self._channel.recv()
        except (EOFError, OSError):
            received = None
        self._stopped = received is None
        return received

    def _asked_to_stop(self) -> bool:
        try:
            while not self._stopped and self._channel.poll():
                self.receive()
        except OSError:
            self._stopped = True
        return self._stopped


def carry_out(order: Order, reporter: Reporter) -> Done | Failed | Died:
    """Carry out an order; how its run ended."""
    import_files_of_parent()
    patience = time.monotonic() + _PATIENCE
    while True:
        try:
            run(order.experiment, overwrite=order.overwrite, listen=reporter, control=reporter.control)
            return Done()
        except InUseError as error:  # noqa: PERF203
            if time.monotonic() > patience or reporter.control.stopping:
                return Failed(error)
            time.sleep(0.5)
        except Interrupted:
            if reporter.stopped_after is None:
                return Died("it was told to stop")
            return Failed(StoppedError(f"stopped after task {reporter.stopped_after + 1}"))
        except InfssmError as error:
            return Failed(error)
        except Exception:
            return Failed(RuntimeError(traceback.format_exc()))
