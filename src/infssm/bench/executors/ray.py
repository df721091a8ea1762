"""Runs on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infssm._memory import RUNS_AT_ONCE
from infssm.bench.executors.executor import Finished, Watch
from infssm.bench.executors.messages import Died, Done, Failed, Message
from infssm.bench.executors.schedule import Schedule
from infssm.bench.executors.working import Reporter, carry_out
from infssm.bench.experiment import Experiment
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import to_yaml
from infssm.learner.display import choose_screen
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.parcel import pack, unpack

_MOMENT = 0.2
"""Seconds between two looks at the cluster."""


class RayExecutor:
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

    def run(
        self,
        experiments: Iterable[Experiment],
        *,
        overwrite: bool = False,
        quiet: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[Finished]:
        """See :class:`Executor`."""
        own = not self._ray.is_initialized()
        if own:
            self._connect()
        try:
            crew, screen = _Cluster(self._ray), choose_screen(quiet)
            yield from Schedule(crew, screen, overwrite=overwrite, retries=self._retries, watch=watch).run(experiments)
        finally:
            if own:
                self._ray.shutdown()

    def _connect(self) -> None:
        address = None if self._address == "auto" else self._address
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at {self._address}: {error}") from None


@dataclass(frozen=True)
class _Order:
    """What a machine is told. ``mark`` is a file it sees only where it shares the folder of the runs."""

    number: int
    experiment: Experiment
    overwrite: bool
    asks: bool
    folder: str
    mark: str


@dataclass(frozen=True)
class _Wanted:
    """The folder of the runs is not shared: send what there is of the run and of its task-0 model."""


@dataclass(frozen=True)
class _Saved:
    """Files of a run and of its task-0 model whose folder is not shared."""

    parcel: bytes
    task0: bytes | None


class _Desk:
    """Where messages lie until they are fetched: an actor beside the starter, so that they outlive their senders."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, Any]] = []
        self._answers: dict[int, Any] = {}
        self._stop = False

    def tell(self, number: int, message: Any) -> bool:
        """Leave a message; whether to save the run and leave."""
        self._messages.append((number, message))
        return self._stop

    def hear(self) -> list[tuple[int, Any]]:
        messages, self._messages = self._messages, []
        return messages

    def reply(self, number: int, value: Any) -> None:
        self._answers[number] = value

    def answer(self, number: int) -> tuple[Any, bool]:
        """The reply to a number, once; and whether to stop."""
        return self._answers.pop(number, None), self._stop

    def stop(self) -> None:
        self._stop = True


@dataclass
class _Attempt:
    experiment: Experiment
    overwrite: bool
    reference: Any = field(default=None)


class _Cluster:
    """See :class:`Crew`."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        here = ray.get_runtime_context().get_node_id()
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        near = strategy(here, soft=False)
        self._desk = ray.remote(num_cpus=0, scheduling_strategy=near)(_Desk).remote()
        self._attempts: dict[int, _Attempt] = {}
        self._marks: dict[Path, Path] = {}
        self._needs: dict[str, float] = {"CPU": 1}

    @property
    def slots(self) -> int:
        there = self._ray.cluster_resources()
        return max(1, int(min(there.get(name, 0) / count for name, count in self._needs.items())))

    def start(self, number: int, experiment: Experiment, *, overwrite: bool, asks: bool) -> None:
        config = experiment.config
        attempt = self._attempts[number] = _Attempt(experiment, overwrite)
        order = _Order(number, experiment, overwrite, asks, os.getcwd(), str(self._mark(config)))
        self._needs = self._resources(config)
        task = self._ray.remote(
            num_cpus=self._needs["CPU"], num_gpus=self._needs.get("GPU", 0), max_retries=0, max_calls=0
        )(_work)
        attempt.reference = task.remote(self._desk, order)

    def _resources(self, config: RunConfig) -> dict[str, float]:
        train = config.train
        needs: dict[str, float] = {"CPU": (train.threads or 1) * train.devices}
        if train.accelerator in ("auto", "cuda") and self._ray.cluster_resources().get("GPU", 0):
            needs["GPU"] = train.devices
        return needs

    def _mark(self, config: RunConfig) -> Path:
        """A file in the folder of the runs, by which others see that they share it."""
        folder = Path(config.out).expanduser().absolute()
        if folder not in self._marks:
            folder.mkdir(parents=True, exist_ok=True)
            self._marks[folder] = folder / f".shared-{uuid.uuid4().hex}"
            self._marks[folder].touch()
        return self._marks[folder]

    def hear(self) -> list[tuple[int, Message]]:
        by_reference = {attempt.reference: number for number, attempt in self._attempts.items()}
        over: list[Any] = []
        if by_reference:
            over, _ = self._ray.wait(list(by_reference), num_returns=len(by_reference), timeout=_MOMENT)
        told: list[tuple[int, Any]] = self._ray.get(self._desk.hear.remote())  # after `over`: it holds all they told
        heard = [(number, message) for number, message in told if not self._kept(number, message)]
        for reference in over:
            number = by_reference[reference]
            heard.append((number, self._end(reference)))
            del self._attempts[number]
        return heard

    def _kept(self, number: int, message: Any) -> bool:
        """Deal with a message that is about files."""
        attempt = self._attempts.get(number)
        if isinstance(message, _Saved):
            if attempt is not None:
                _keep(attempt.experiment, message)
            return True
        if isinstance(message, _Wanted):
            if attempt is not None:
                self._desk.reply.remote(number, _files(attempt))
            return True
        return False

    def _end(self, reference: Any) -> Message:
        try:
            end: Message = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return Failed(RuntimeError(str(error)))
        except self._ray.exceptions.RayError as error:
            return Died(f"the cluster lost it ({type(error).__name__})")
        return end

    def reply(self, number: int, go_on: bool) -> None:
        self._desk.reply.remote(number, go_on)

    def stop(self) -> None:
        self._ray.get(self._desk.stop.remote())

    def close(self) -> None:
        for attempt in self._attempts.values():
            self._ray.cancel(attempt.reference, force=True)
        self._ray.kill(self._desk)
        for mark in self._marks.values():
            mark.unlink(missing_ok=True)


def _files(attempt: _Attempt) -> tuple[bytes | None, bytes | None, bytes | None]:
    """What a machine without the folder needs: what there is of the run, of its task-0 model, and weights by path."""
    experiment = attempt.experiment
    run, start = RunDirectory(experiment.path), experiment.config.train.task0
    if attempt.overwrite and run.is_run:
        RunDirectory.create(run.path, overwrite=True)
    weights = Path(start).read_bytes() if Path(start).is_file() else None
    return pack(run) if run.is_run else None, _task0_parcel(experiment), weights


def _task0_parcel(experiment: Experiment) -> bytes | None:
    """The task-0 model that an experiment starts from, where it is made."""
    if experiment.task0_weights is None or not experiment.task0_weights.is_file():
        return None
    assert experiment.task0 is not None
    return pack(RunDirectory(experiment.task0.path))


def _keep(experiment: Experiment, files: _Saved) -> None:
    """Write files that were sent to where the experiment and its task-0 model belong."""
    unpack(RunDirectory(experiment.path), files.parcel, to_yaml(experiment.config))
    if files.task0 is not None and experiment.task0 is not None:
        unpack(RunDirectory(experiment.task0.path), files.task0, to_yaml(experiment.task0.config))


class _ToDesk:
    """See :class:`Line`."""

    def __init__(self, ray: Any, desk: Any, number: int) -> None:
        self._ray, self._desk, self._number = ray, desk, number
        self._stop = False

    def tell(self, message: Any) -> None:
        self._stop = self._ray.get(self._desk.tell.remote(self._number, message)) or self._stop

    def asked_to_stop(self) -> bool:
        return self._stop

    def fetch(self) -> Any:
        """Wait for the reply to the last message; None where the run shall stop."""
        while True:
            value, self._stop = self._ray.get(self._desk.answer.remote(self._number))
            if value is not None or self._stop:
                return value
            time.sleep(_MOMENT)

    def answer(self) -> bool:
        return self.fetch() is not False


def _work(desk: Any, order: _Order) -> Done | Failed | Died:
    """Carry out an order, on a machine of the cluster."""
    ray = importlib.import_module("ray")
    line = _ToDesk(ray, desk, order.number)
    at_once = (os.cpu_count() or 1) // (order.experiment.config.train.threads or 1)
    os.environ[RUNS_AT_ONCE] = str(max(1, at_once))
    if Path(order.mark).exists():
        os.chdir(order.folder)
        return carry_out(order.experiment, Reporter(line, asks=order.asks), overwrite=order.overwrite)
    with tempfile.TemporaryDirectory(prefix="infssm-") as folder:
        return _work_apart(line, order, Path(folder))


def _work_apart(line: _ToDesk, order: _Order, folder: Path) -> Done | Failed | Died:
    """Carry out an order in a folder of this machine, and send what is made there."""
    line.tell(_Wanted())
    received = line.fetch()
    if received is None:
        return Died("it was told to stop")
    before, first, weights = received
    changes: dict[str, Any] = {"out": str(folder / "runs")}
    if weights is not None:
        start = folder / "start.safetensors"
        start.write_bytes(weights)
        changes["train"] = order.experiment.config.train.model_copy(update={"task0": str(start)})
    experiment = Experiment(order.experiment.config.model_copy(update=changes))
    run, sent = RunDirectory(experiment.path), dict[str, str]()
    _keep(experiment, _Saved(before or pack(run), first))
    pack(run, sent)
    told = first is not None

    def send() -> None:
        nonlocal told
        made = None if told else _task0_parcel(experiment)
        told = told or made is not None
        line.tell(_Saved(pack(run, sent), made))

    end = carry_out(experiment, Reporter(line, asks=order.asks, send=send), overwrite=False)
    with contextlib.suppress(OSError):
        send()
    return end
