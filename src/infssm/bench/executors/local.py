"""Several runs at once, each in a process of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess

import torch

from infssm._memory import RUNS_AT_ONCE
from infssm.bench.executors.executor import Finished, Watch
from infssm.bench.executors.messages import Died, Done, Failed, Message
from infssm.bench.executors.schedule import Schedule
from infssm.bench.executors.working import Reporter, carry_out
from infssm.bench.experiment import Experiment
from infssm.errors import ConfigError
from infssm.learner.display import choose_screen

_PRELOADED = "infssm.bench.executors.imported"
"""Imported by the fork server, so that worker processes start quickly."""
_MOMENT = 0.2
"""Seconds to wait for a message before looking at signals."""
_GRACE = 10.0
"""Seconds a process without work may take to leave."""


class LocalProcesses:
    """Carries out experiments in ``processes`` processes of this machine, which share its memory and cores equally.

    A process that dies (killed, out of memory) is replaced and its run resumed from its checkpoint, at most
    ``retries`` times within one task. A script that uses this needs ``if __name__ == "__main__":`` around what it does,
    as with all of Python's processes.
    """

    def __init__(self, processes: int, *, retries: int = 3) -> None:
        if processes < 1:
            raise ConfigError(f"--jobs {processes}: at least one process is needed")
        self._processes, self._retries = processes, retries

    def run(
        self,
        experiments: Iterable[Experiment],
        *,
        overwrite: bool = False,
        quiet: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[Finished]:
        """See :class:`Executor`."""
        crew, screen = _Processes(self._processes), choose_screen(quiet)
        return Schedule(crew, screen, overwrite=overwrite, retries=self._retries, watch=watch).run(experiments)


@dataclass(frozen=True)
class _Order:
    experiment: Experiment
    overwrite: bool
    asks: bool


class _Stop:
    """What is sent to a process that shall leave."""


@dataclass
class _Worker:
    process: SpawnProcess | ForkServerProcess
    connection: Connection
    number: int | None = None
    """Of the attempt it works on."""

    def send(self, message: _Order | _Stop | bool) -> None:
        with contextlib.suppress(OSError):  # it is dead, which will be heard
            self.connection.send(message)

    def receive(self) -> Message | None:
        """The next message; None from one that is dead."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            return None
        return message

    def bury(self) -> int | None:
        """Let go of a dead process; its exit code."""
        self.connection.close()
        self.process.join()
        return self.process.exitcode


class _Processes:
    """See :class:`Crew`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._workers: list[_Worker] = []

    def start(self, number: int, experiment: Experiment, *, overwrite: bool, asks: bool) -> None:
        worker = next((worker for worker in self._workers if worker.number is None), None) or self._hire()
        worker.number = number
        worker.send(_Order(experiment, overwrite, asks))

    def _hire(self) -> _Worker:
        context = _context()
        here, there = context.Pipe()
        environment = {**os.environ, RUNS_AT_ONCE: str(self.slots)}
        process = context.Process(target=_work, args=(there, environment), name="infssm-run")
        process.start()
        there.close()  # else the end of the process would not be the end of the pipe
        self._workers.append(_Worker(process, here))
        return self._workers[-1]

    def hear(self) -> list[tuple[int, Message]]:
        heard: list[tuple[int, Message]] = []
        ready = wait([worker.connection for worker in self._workers], _MOMENT)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            message = worker.receive()
            if message is None:
                self._workers.remove(worker)
                message = Died(_how(worker.bury()))
            if worker.number is not None:
                heard.append((worker.number, message))
            if isinstance(message, Done | Failed | Died):
                worker.number = None
        return heard

    def reply(self, number: int, go_on: bool) -> None:
        next(worker for worker in self._workers if worker.number == number).send(go_on)

    def stop(self) -> None:
        for worker in self._workers:
            worker.send(_Stop())

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()  # one without work leaves now
            if worker.number is not None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(_GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"its process left with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", as the system does where memory runs out" if -code == getattr(signal, "SIGKILL", 9) else ""
    return f"its process was ended by {name}{hint}"


class _Pipe:
    """See :class:`Line`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stop = False

    def tell(self, message: Message) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._stop = True

    def receive(self) -> _Order | bool | None:
        """Wait for what comes next; None where that is the end."""
        if self._stop:
            return None
        try:
            received: _Order | _Stop | bool = self._connection.recv()
        except (EOFError, OSError):
            received = _Stop()
        if isinstance(received, _Stop):
            self._stop = True
            return None
        return received

    def asked_to_stop(self) -> bool:
        try:
            while not self._stop and self._connection.poll():
                self.receive()
        except OSError:
            self._stop = True
        return self._stop

    def answer(self) -> bool:
        return self.receive() is not False


def _context() -> SpawnContext | ForkServerContext:
    """How to start a process: with the library imported already, where CUDA does not forbid it."""
    if "forkserver" not in multiprocessing.get_all_start_methods() or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    with _without_ctrl_c():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ignore SIGINT for a moment, so that the fork server is started with SIGINT ignored, which it keeps.

    A terminal sends Ctrl-C to every process of the command. The fork server ignores it only once its imports are done;
    before that, the interrupt ended it inside an import, and this process waited for it for ever.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, environment: Mapping[str, str]) -> None:
    """Carry out orders until the other side closes the pipe or dies."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes: runs catch it, the rest is the parent's
    os.environ.update(environment)
    pipe = _Pipe(connection)
    while isinstance(order := pipe.receive(), _Order):
        pipe.tell(carry_out(order.experiment, Reporter(pipe, asks=order.asks), overwrite=order.overwrite))
