"""Several runs at once, each in a process of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess

import torch

from infssm._machine import RUNS_AT_ONCE
from infssm.bench.executors.schedule import PoolExecutor
from infssm.bench.executors.worker import Died, Done, Failed, Message, Order, Reporter, carry_out
from infssm.errors import ConfigError

_PRELOADED = "infssm.bench.executors.imported"
"""Imported by the fork server, so that worker processes start quickly."""
_MOMENT = 0.2
"""Seconds to wait for a message before looking at signals."""


class LocalProcesses(PoolExecutor):
    """Carries out experiments in ``processes`` processes of this machine, which share its memory and cores equally.

    A process that dies (killed, out of memory) is replaced and its run resumed from its checkpoint, at most
    ``retries`` times within one task. A script that uses this needs ``if __name__ == "__main__":`` around what it does,
    as with all of Python's processes.
    """

    def __init__(self, processes: int, *, retries: int = 3) -> None:
        if processes < 1:
            raise ConfigError(f"--jobs {processes}: at least one process is needed")
        self._processes, self._retries = processes, retries

    def _open(self) -> _Processes:
        return _Processes(self._processes)


class _Processes:
    """See :class:`WorkerPool`. Every attempt has a process of its own.

    concurrent.futures would do for the runs, but one killed process breaks its whole pool, and joblib cannot send what
    happens during a run; a pipe for each process can, and end-of-file on it shows that the process ended.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._workers: dict[int, tuple[SpawnProcess | ForkServerProcess, Connection]] = {}

    def start(self, number: int, order: Order) -> None:
        context = _context()
        here, there = context.Pipe()
        environment = {**os.environ, RUNS_AT_ONCE: str(self.slots)}
        process = context.Process(target=_work, args=(there, order, environment), name="infssm-run")
        process.start()
        there.close()  # else the end of the process would not be the end of the pipe
        self._workers[number] = process, here

    def receive(self) -> list[tuple[int, Message]]:
        received: list[tuple[int, Message]] = []
        ready = wait([connection for _, connection in self._workers.values()], _MOMENT)
        for number, (process, connection) in list(self._workers.items()):
            if connection not in ready:
                continue
            try:
                message = connection.recv()
            except (EOFError, OSError):
                process.join()
                message = Died(describe_exit(process.exitcode))
            if isinstance(message, Done | Failed | Died):
                self._release(number)
            received.append((number, message))
        return received

    def _release(self, number: int) -> None:
        process, connection = self._workers.pop(number)
        connection.close()
        process.join(10)  # seconds that a process may take to leave after its last message
        process.kill()
        process.join()

    def reply(self, number: int, answer: bool | None) -> None:
        with contextlib.suppress(OSError, KeyError):  # the process is dead, which receive() reports
            self._workers[number][1].send(answer)

    def close(self) -> None:
        for process, _ in self._workers.values():
            process.kill()
        for number in list(self._workers):
            self._release(number)


def describe_exit(code: int | None) -> str:
    """A description of how a process ended."""
    if code is None or code >= 0:
        return f"its process left with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", as the system does where memory runs out" if -code == getattr(signal, "SIGKILL", 9) else ""
    return f"its process was ended by {name}{hint}"


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


def _work(connection: Connection, order: Order, environment: Mapping[str, str]) -> None:
    # Ctrl-C reaches all processes. Runs catch it themselves; the parent asks for what else is to be done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    reporter = Reporter(connection, asks=order.asks)
    reporter.tell(carry_out(order, reporter))
