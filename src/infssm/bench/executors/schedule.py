"""Which experiment is started when, and what happens after it: alike for all executors with several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infssm.bench.executors.executor import Finished, Watch
from infssm.bench.executors.messages import Died, Done, Failed, Message
from infssm.bench.experiment import Experiment
from infssm.bench.reports.report import write_report
from infssm.bench.running import forget_task0
from infssm.data import Split
from infssm.errors import InfssmError
from infssm.learner.display import Display, Screen
from infssm.learner.events import Control, RunBegan, RunEnded, TaskEnded
from infssm.learner.result import Result
from infssm.learner.setup import check_data
from infssm.learner.signals import Interrupted, stop_on_signals
from infssm.learner.store.directory import RunDirectory


class LostError(InfssmError):
    """A run whose process ended again and again."""


class Crew(Protocol):
    """Processes that carry out runs. An attempt at an experiment has a number of its own."""

    @property
    def slots(self) -> int:
        """How many can work at once, now."""

    def start(self, number: int, experiment: Experiment, *, overwrite: bool, asks: bool) -> None:
        """Carry out an experiment; ``asks``: wait for :meth:`reply` after each of its tasks."""

    def hear(self) -> list[tuple[int, Message]]:
        """Messages with the numbers of their attempts; waits a moment where there are none."""

    def reply(self, number: int, go_on: bool) -> None:
        """Answer a task that is done."""

    def stop(self) -> None:
        """Ask all to save and leave; they end with a message."""

    def close(self) -> None:
        """Let go of all processes; those that still work end at once."""


@dataclass
class _Attempt:
    experiment: Experiment
    display: Display


class Schedule:
    """Experiments on their way through a crew."""

    def __init__(self, crew: Crew, screen: Screen, *, overwrite: bool, retries: int, watch: Watch | None) -> None:
        self._crew, self._screen, self._watch = crew, screen, watch
        self._overwrite, self._retries = overwrite, retries
        self._waiting: list[Experiment] = []
        self._running: dict[int, _Attempt] = {}
        self._begun: set[Experiment] = set()
        self._renewed: set[Path | None] = set()
        self._deaths: Counter[Experiment] = Counter()
        self._numbers = 0

    def run(self, experiments: Iterable[Experiment]) -> Iterator[Finished]:
        """Start experiments while slots are free and yield those that are over."""
        source = iter(experiments)
        control = Control()
        with stop_on_signals(control):
            try:
                while True:
                    yield from self._fill(source)
                    if not self._running and not self._waiting:
                        return
                    heard = self._crew.hear()
                    if control.stopping:
                        self._leave(heard)
                        raise Interrupted("interrupted; all runs are saved, and the same command continues them")
                    for number, message in heard:
                        if (end := self._take(number, message)) is not None:
                            yield end
            finally:
                self._leave()
                self._crew.close()
                self._screen.stop()

    def _fill(self, source: Iterator[Experiment]) -> Iterator[Finished]:
        """Start what can be; yield what is complete already."""
        while len(self._running) < self._crew.slots and (experiment := self._next(source)) is not None:
            overwrite = self._overwrite and experiment not in self._begun
            run = RunDirectory(experiment.path)
            if not overwrite and run.complete:
                try:
                    check_data(experiment.config, Split.load(run.split_path))
                except InfssmError as error:
                    yield Finished(experiment, error=error)
                    continue
                self._screen.note(f"{experiment.name}: already complete: {run.path} (repeat it with --overwrite)")
                yield _completed(experiment)
                continue
            if self._overwrite and experiment.task0_weights not in self._renewed:
                self._renewed.add(experiment.task0_weights)
                forget_task0(experiment)
            self._numbers += 1
            self._running[self._numbers] = _Attempt(experiment, self._screen.open(experiment.name))
            self._crew.start(self._numbers, experiment, overwrite=overwrite, asks=self._watch is not None)

    def _next(self, source: Iterator[Experiment]) -> Experiment | None:
        """An experiment that can start: one that waited, else a new one. No more wait than could run."""
        if (ready := next(filter(self._is_ready, self._waiting), None)) is not None:
            self._waiting.remove(ready)
            return ready
        while len(self._waiting) < self._crew.slots and (experiment := next(source, None)) is not None:
            if self._is_ready(experiment):
                return experiment
            self._waiting.append(experiment)
        return None

    def _is_ready(self, experiment: Experiment) -> bool:
        """Whether it would not just wait for a task-0 model that another experiment is about to train."""
        model = experiment.task0_weights
        making = [attempt.experiment.task0_weights for attempt in self._running.values()]
        return model is None or model not in making or model.is_file()

    def _take(self, number: int, message: Message) -> Finished | None:
        """What a message means for its experiment; the end of it, if it is that."""
        if (attempt := self._running.get(number)) is None:
            return None
        experiment = attempt.experiment
        if isinstance(message, RunBegan | TaskEnded | Done):
            self._begun.add(experiment)
        if isinstance(message, TaskEnded):
            self._deaths[experiment] = 0
            if self._watch is not None:
                self._crew.reply(number, self._watch(experiment, message.task, message.average))
        if not isinstance(message, Done | Failed | Died):
            if not isinstance(message, RunEnded):  # a line stays until the process says how the run ended
                attempt.display(message)
            return None
        del self._running[number]
        attempt.display.stop()
        return self._conclude(experiment, message)

    def _conclude(self, experiment: Experiment, message: Done | Failed | Died) -> Finished | None:
        if isinstance(message, Done):
            return _completed(experiment)
        if isinstance(message, Failed):
            return Finished(experiment, error=message.error)
        self._deaths[experiment] += 1
        if self._deaths[experiment] <= self._retries:
            self._screen.note(f"{experiment.name}: {message.reason}; it continues from its checkpoint")
            self._waiting.insert(0, experiment)
            return None
        reason = (
            f"its process ended {self._deaths[experiment]} times in one task, the last time because {message.reason}; "
            f"what it saved is in {experiment.path}. Where memory was short, run fewer at once or lower "
            "train.batch_size"
        )
        return Finished(experiment, error=LostError(reason))

    def _leave(self, heard: Iterable[tuple[int, Message]] = ()) -> None:
        """Have all runs saved, and wait for it; ``heard`` are messages that came before."""
        if self._running:
            self._crew.stop()
        while True:
            for number, message in heard:
                if isinstance(message, Done | Failed | Died):
                    self._running.pop(number, None)
            if not self._running:
                return
            heard = self._crew.hear()


def _completed(experiment: Experiment) -> Finished:
    """The end of an experiment whose run is complete, with a report; of one whose files are damaged, too."""
    try:
        result = Result.load(experiment.path)
        if not result.report.exists():
            write_report(RunDirectory(experiment.path))
    except InfssmError as error:
        return Finished(experiment, error=error)
    return Finished(experiment, result)
