"""Runs on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infssm._machine import RUNS_AT_ONCE
from infssm.bench.executors.schedule import PoolExecutor
from infssm.bench.executors.worker import Died, Done, Failed, Message, Order, Reporter, carry_out
from infssm.bench.experiment import Experiment
from infssm.errors import ConfigError
from infssm.learner.config.load import to_yaml
from infssm.learner.store.directory import RunDirectory, pack, unpack

_MOMENT = 0.2
"""Seconds between two polls of the cluster."""


class RayExecutor(PoolExecutor):
    """Carries out experiments on a Ray cluster, as many at once as it has cores (or GPUs) for.

    ``address``: of the cluster; ``"auto"``: the one of this machine or of ``$RAY_ADDRESS``, else one that is started on
    this machine and ended with the plan. Where a machine sees the folder of the runs, they are written there; else
    their files are sent after each task. A run whose process or machine dies continues elsewhere from what was written
    or sent last, at most ``retries`` times within one task. Every machine needs infssm, and the data at the same place.
    """

    def __init__(self, address: str = "auto", *, retries: int = 3) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when it is imported
        try:
            self._ray = importlib.import_module("ray")
        except ImportError:
            raise ConfigError("--ray needs ray: pip install 'infssm[ray]'") from None
        self._address, self._retries = address, retries

    def _open(self) -> _Cluster:
        own = not self._ray.is_initialized()
        if own:
            address = None if self._address == "auto" else self._address
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"no Ray cluster at {self._address}: {error}") from None
        return _Cluster(self._ray, own)


@dataclass(frozen=True)
class _Files:
    """A run, its task-0 model and the weights it starts from, for a machine that does not see their folder."""

    run: bytes | None
    task0: bytes | None = None
    start: bytes | None = None


@dataclass(frozen=True)
class _FilesWanted:
    """The folder of the runs is not shared: the worker asks for what there is of its run."""


class _Mailbox:
    """Holds messages until they are fetched: an actor on the driver's node, so that they outlive their senders."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, Any]] = []
        self._replies: defaultdict[int, list[Any]] = defaultdict(list)

    def tell(self, number: int, *messages: Any) -> list[Any]:
        """Leave messages of an attempt and take the replies to it."""
        self._messages += [(number, message) for message in messages]
        return self._replies.pop(number, [])

    def receive(self) -> list[tuple[int, Any]]:
        messages, self._messages = self._messages, []
        return messages

    def reply(self, number: int, value: Any) -> None:
        self._replies[number].append(value)


class _Cluster:
    """See :class:`WorkerPool`. ``own``: whether to leave the cluster at the end."""

    def __init__(self, ray: Any, own: bool) -> None:
        self._ray, self._own = ray, own
        here = ray.get_runtime_context().get_node_id()
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        near = strategy(here, soft=False)
        self._mailbox = ray.remote(num_cpus=0, scheduling_strategy=near)(_Mailbox).remote()
        self._attempts: dict[int, tuple[Order, Any]] = {}
        self._marks: dict[Path, Path] = {}
        self._needs: dict[str, float] = {"CPU": 1}

    @property
    def slots(self) -> int:
        there = self._ray.cluster_resources()
        return max(1, int(min(there.get(name, 0) / count for name, count in self._needs.items())))

    def start(self, number: int, order: Order) -> None:
        train = order.experiment.config.train
        self._needs = {"CPU": (train.threads or 1) * train.devices}
        if train.accelerator in ("auto", "cuda") and self._ray.cluster_resources().get("GPU", 0):
            self._needs["GPU"] = train.devices
        cores, gpus = self._needs["CPU"], self._needs.get("GPU", 0)
        task = self._ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=0, max_calls=0)(_work)
        mark = str(self._mark(Path(order.experiment.config.out).expanduser().absolute()))
        self._attempts[number] = order, task.remote(self._mailbox, number, order, os.getcwd(), mark)

    def _mark(self, folder: Path) -> Path:
        """A file in the folder of the runs, which only machines that share the folder see."""
        if folder not in self._marks:
            folder.mkdir(parents=True, exist_ok=True)
            self._marks[folder] = folder / f".shared-{uuid.uuid4().hex}"
            self._marks[folder].touch()
        return self._marks[folder]

    def receive(self) -> list[tuple[int, Message]]:
        by_reference = {reference: number for number, (_, reference) in self._attempts.items()}
        over: list[Any] = []
        if by_reference:
            over, _ = self._ray.wait(list(by_reference), num_returns=len(by_reference), timeout=_MOMENT)
        # Fetched after `over`, so it includes all messages of finished attempts.
        told = self._ray.get(self._mailbox.receive.remote())
        received: list[tuple[int, Message]] = []
        for number, message in told:
            if not isinstance(message, _Files | _FilesWanted):
                received.append((number, message))
            elif number in self._attempts:
                order = self._attempts[number][0]
                if isinstance(message, _Files):
                    _write(order.experiment, message)
                else:
                    self._mailbox.reply.remote(number, _read(order))
        for reference in over:
            number = by_reference[reference]
            received.append((number, self._end(reference)))
            del self._attempts[number]
        return received

    def _end(self, reference: Any) -> Message:
        try:
            end: Message = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return Failed(RuntimeError(str(error)))
        except self._ray.exceptions.RayError as error:
            return Died(f"its worker was lost ({type(error).__name__})")
        return end

    def reply(self, number: int, answer: bool | None) -> None:
        self._ray.get(self._mailbox.reply.remote(number, answer))

    def close(self) -> None:
        for _, reference in self._attempts.values():
            self._ray.cancel(reference, force=True)
        self._ray.kill(self._mailbox)
        for mark in self._marks.values():
            mark.unlink(missing_ok=True)
        if self._own:
            self._ray.shutdown()


def _read(order: Order) -> _Files:
    """The files that a machine without the folder needs for a run."""
    run, start = RunDirectory(order.experiment.path), Path(order.experiment.config.train.task0)
    if order.overwrite and run.is_run:
        RunDirectory.create(run.path, overwrite=True)
    weights = start.read_bytes() if start.is_file() else None
    return _Files(pack(run) if run.is_run else None, _read_task0(order.experiment), weights)


def _read_task0(experiment: Experiment) -> bytes | None:
    """The task-0 model that an experiment starts from, where it is made."""
    if experiment.task0 is None or not RunDirectory(experiment.task0.path).weights_path(0).is_file():
        return None
    return pack(RunDirectory(experiment.task0.path))


def _write(experiment: Experiment, files: _Files) -> None:
    """Write files that were sent to where the experiment and its task-0 model belong."""
    if files.run is not None:
        unpack(RunDirectory(experiment.path), files.run, to_yaml(experiment.config))
    if files.task0 is not None and experiment.task0 is not None:
        unpack(RunDirectory(experiment.task0.path), files.task0, to_yaml(experiment.task0.config))


class _MailboxChannel:
    """See :class:`Channel`. Replies come with each message that is sent, so that asking for them costs nothing."""

    def __init__(self, ray: Any, mailbox: Any, number: int) -> None:
        self._ray, self._mailbox, self._number = ray, mailbox, number
        self._replies: list[Any] = []

    def send(self, *messages: Any) -> None:
        self._replies += self._ray.get(self._mailbox.tell.remote(self._number, *messages))

    def poll(self) -> bool:
        return bool(self._replies)

    def recv(self) -> Any:
        while not self._replies:
            time.sleep(_MOMENT)
            self.send()
        return self._replies.pop(0)


def _work(mailbox: Any, number: int, order: Order, folder: str, mark: str) -> Done | Failed | Died:
    """Carry out an order, on a machine of the cluster."""
    channel = _MailboxChannel(importlib.import_module("ray"), mailbox, number)
    at_once = (os.cpu_count() or 1) // (order.experiment.config.train.threads or 1)
    os.environ[RUNS_AT_ONCE] = str(max(1, at_once))
    if Path(mark).exists():
        os.chdir(folder)
        return carry_out(order, Reporter(channel, asks=order.asks))
    with tempfile.TemporaryDirectory(prefix="infssm-") as own:
        return _work_apart(channel, order, Path(own))


def _work_apart(channel: _MailboxChannel, order: Order, folder: Path) -> Done | Failed | Died:
    """Carry out an order in a folder of this machine, and send what is made there."""
    channel.send(_FilesWanted())
    received: _Files | None = channel.recv()
    if received is None:
        return Died("it was told to stop")
    changes: dict[str, Any] = {"out": str(folder / "runs")}
    if received.start is not None:
        start = folder / "start.safetensors"
        start.write_bytes(received.start)
        changes["train"] = order.experiment.config.train.model_copy(update={"task0": str(start)})
    experiment = Experiment(order.experiment.config.model_copy(update=changes))
    run, known = RunDirectory(experiment.path), dict[str, str]()
    _write(experiment, received)
    if received.run is not None:
        pack(run, known)
    task0_known = received.task0 is not None

    def send_files() -> None:
        nonlocal task0_known
        task0 = None if task0_known else _read_task0(experiment)
        task0_known = task0_known or task0 is not None
        channel.send(_Files(pack(run, known), task0))

    apart = replace(order, experiment=experiment, overwrite=False)
    end = carry_out(apart, Reporter(channel, asks=order.asks, send_files=send_files))
    with contextlib.suppress(OSError):
        send_files()
    return end
