"""Which experiment is started when, and what happens after it: alike for all executors with several processes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infssm.bench.executors.executor import Finished, Watch, renew
from infssm.bench.executors.worker import Died, Done, Failed, Message, Order
from infssm.bench.experiment import Experiment
from infssm.bench.reports.report import write_report
from infssm.data import Split
from infssm.errors import InfssmError
from infssm.learner.events import (
    Control,
    Display,
    Interrupted,
    RunBegan,
    RunEnded,
    Screen,
    TaskEnded,
    choose_screen,
    stop_on_signals,
)
from infssm.learner.result import Result
from infssm.learner.setup import check_data
from infssm.learner.store.directory import RunDirectory


class LostError(InfssmError):
    """A run whose process died repeatedly."""


class WorkerPool(Protocol):
    """Workers that execute runs. Every attempt at an experiment has its own number."""

    @property
    def slots(self) -> int:
        """How many can work at once, now."""

    def start(self, number: int, order: Order) -> None:
        """Have a worker carry out an order."""

    def receive(self) -> list[tuple[int, Message]]:
        """Messages with the numbers of their attempts; waits a moment if there are none."""

    def reply(self, number: int, answer: bool | None) -> None:
        """Answer a finished task: whether to continue. None, at any time, asks the worker to save the run and exit."""

    def close(self) -> None:
        """Release all workers; those still at work are killed."""


class PoolExecutor(ABC):
    """An executor whose experiments are carried out by a pool of workers."""

    _retries: int

    @abstractmethod
    def _open(self) -> WorkerPool: ...

    def run(
        self,
        experiments: Iterable[Experiment],
        *,
        overwrite: bool = False,
        quiet: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[Finished]:
        """See :class:`Executor`."""
        schedule = Schedule(self._open(), choose_screen(quiet), overwrite, self._retries, watch)
        yield from schedule.run(experiments)


@dataclass(eq=False)
class _Job:
    """An experiment that waits or runs; ``deaths`` are those of its workers since its last complete task."""

    experiment: Experiment
    display: Display
    begun: bool = False
    deaths: int = 0


class Schedule:
    """Which experiments wait, which are carried out by the workers of a pool, and what they report."""

    def __init__(self, pool: WorkerPool, screen: Screen, overwrite: bool, retries: int, watch: Watch | None) -> None:
        self._pool, self._screen, self._watch = pool, screen, watch
        self._overwrite, self._retries = overwrite, retries
        self._waiting: list[_Job] = []
        self._running: dict[int, _Job] = {}
        self._received: list[tuple[int, Message]] = []
        self._numbers = itertools.count()
        self._renewed: set[Path] = set()

    def run(self, experiments: Iterable[Experiment]) -> Iterator[Finished]:
        """Start experiments while slots are free and yield those that are over."""
        source = (self._job(experiment) for experiment in experiments)
        control = Control()
        with stop_on_signals(control):
            try:
                while True:
                    yield from self._fill(source)
                    if not self._running and not self._waiting:
                        return
                    self._received = self._pool.receive()
                    while self._received and not control.stopping:
                        if (end := self._take(*self._received.pop(0))) is not None:
                            yield end
                    if control.stopping:
                        self._leave()
                        raise Interrupted("interrupted; all runs are saved, and the same command continues them")
            finally:
                self._leave()
                self._pool.close()
                self._screen.stop()

    def _job(self, experiment: Experiment) -> _Job:
        if self._overwrite:
            renew(experiment, self._renewed)
        return _Job(experiment, self._screen.open(experiment.name))

    def _fill(self, source: Iterator[_Job]) -> Iterator[Finished]:
        """Start what can be; yield what is complete already."""
        while len(self._running) < self._pool.slots and (job := self._next(source)) is not None:
            experiment, overwrite = job.experiment, self._overwrite and not job.begun
            run = RunDirectory(experiment.path)
            if run.complete and not overwrite:
                try:
                    check_data(experiment.config, Split.load(run.split_path))
                except InfssmError as error:
                    yield Finished(experiment, error=error)
                    continue
                self._screen.note(f"{experiment.name}: already complete: {run.path} (repeat it with --overwrite)")
                yield _completed(experiment)
                continue
            number = next(self._numbers)
            self._running[number] = job
            self._pool.start(number, Order(experiment, overwrite, asks=self._watch is not None))

    def _next(self, source: Iterator[_Job]) -> _Job | None:
        """An experiment that can start: one that waited, else a new one. No more wait than could run."""
        if (ready := next(filter(self._is_ready, self._waiting), None)) is not None:
            self._waiting.remove(ready)
            return ready
        while len(self._waiting) < self._pool.slots and (job := next(source, None)) is not None:
            if self._is_ready(job):
                return job
            self._waiting.append(job)
        return None

    def _is_ready(self, job: _Job) -> bool:
        """Whether it can start: no running experiment is training the task-0 model that it needs."""
        model = job.experiment.task0_weights
        making = [other.experiment.task0_weights for other in self._running.values()]
        return model is None or model not in making or model.is_file()

    def _take(self, number: int, message: Message) -> Finished | None:
        """Handle a message of an experiment; returns its end, if the message is the last one."""
        if (job := self._running.get(number)) is None:
            return None
        experiment = job.experiment
        if isinstance(message, RunBegan | TaskEnded | Done):
            job.begun = True
        if isinstance(message, TaskEnded):
            job.deaths = 0
            if self._watch is not None:
                self._pool.reply(number, self._watch(experiment, message.task, message.average))
        if not isinstance(message, Done | Failed | Died):
            if not isinstance(message, RunEnded):  # the line stays until the worker has reported how the run ended
                job.display(message)
            return None
        del self._running[number]
        job.display.stop()
        if isinstance(message, Done):
            return _completed(experiment)
        if isinstance(message, Failed):
            return Finished(experiment, error=message.error)
        job.deaths += 1
        if job.deaths <= self._retries:
            self._screen.note(f"{experiment.name}: {message.reason}; it continues from its checkpoint")
            self._waiting.insert(0, job)
            return None
        reason = (
            f"its process ended {job.deaths} times in one task, the last time because {message.reason}; what it saved "
            f"is in {experiment.path}. Where memory was short, run fewer at once or lower train.batch_size"
        )
        return Finished(experiment, error=LostError(reason))

    def _leave(self) -> None:
        """Ask all workers to save their runs, and wait until they have."""
        for number in self._running:
            self._pool.reply(number, None)
        while True:
            for number, message in self._received:
                if isinstance(message, Done | Failed | Died):
                    self._running.pop(number, None)
            if not self._running:
                return
            self._received = self._pool.receive()


def _completed(experiment: Experiment) -> Finished:
    """The end of an experiment whose run is complete, with a report; an error where its files are damaged."""
    run = RunDirectory(experiment.path)
    try:
        result = Result.load(run.path)
        if not result.report.exists():
            write_report(run)
    except InfssmError as error:
        return Finished(experiment, error=error)
    return Finished(experiment, result)
