"""Which job is started when, and what happens after it: alike for all executors with several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from infssm.bench.executors.job import Finished, Job, Watch, needed_failed
from infssm.bench.executors.messages import Died, Done, Failed, Message, Started, TaskDone, show
from infssm.bench.reports.report import write_report
from infssm.data import Split
from infssm.errors import InfssmError
from infssm.learner.display import Display, Screen
from infssm.learner.result import Result
from infssm.learner.setup import check_data
from infssm.learner.signals import Interrupted, Signals
from infssm.learner.store.directory import RunDirectory


class LostError(InfssmError):
    """A run whose process ended again and again."""


class Crew(Protocol):
    """Processes that carry out runs. An attempt at a job has a number of its own."""

    @property
    def slots(self) -> int:
        """How many can work at once, now."""

    def start(self, number: int, job: Job, *, overwrite: bool, asks: bool) -> None:
        """Carry out a job that is ready; ``asks``: wait for :meth:`reply` after each of its tasks."""

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
    job: Job
    display: Display


class Schedule:
    """Jobs on their way through a crew."""

    def __init__(self, crew: Crew, screen: Screen, *, overwrite: bool, retries: int, watch: Watch | None) -> None:
        self._crew, self._screen, self._watch = crew, screen, watch
        self._overwrite, self._retries = overwrite, retries
        self._waiting: list[Job] = []
        self._running: dict[int, _Attempt] = {}
        self._begun: set[Job] = set()
        self._over: set[Job] = set()
        self._has_model: set[Job] = set()
        self._deaths: Counter[Job] = Counter()
        self._numbers = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Finished]:
        """Start jobs as there is room and yield those that are over."""
        source = iter(jobs)
        with Signals() as signals:
            try:
                while True:
                    yield from self._fill(source)
                    if not self._running and not self._waiting:
                        return
                    heard = self._crew.hear()
                    if signals.pending:
                        self._leave(heard)
                        raise Interrupted("interrupted; all runs are saved, and the same command continues them")
                    for number, message in heard:
                        if (end := self._take(number, message)) is not None:
                            yield end
            finally:
                self._leave()
                self._crew.close()
                self._screen.stop()

    def _fill(self, source: Iterator[Job]) -> Iterator[Finished]:
        """Start what can be; yield jobs that never can."""
        for left in [job for job in self._waiting if job.needs in self._over and not self._is_ready(job)]:
            self._waiting.remove(left)
            yield self._end(Finished(left, error=needed_failed(left)))
        while len(self._running) < self._crew.slots and (job := self._next(source)) is not None:
            overwrite = self._overwrite and job not in self._begun
            if not overwrite and RunDirectory(job.path).complete:
                try:
                    check_data(job.config, Split.load(RunDirectory(job.path).split_path))
                except InfssmError as error:
                    yield self._end(Finished(job, error=error))
                    continue
                self._screen.note(f"{job.name}: already complete: {job.path} (repeat it with --overwrite)")
                yield self._completed(job)
                continue
            self._numbers += 1
            self._running[self._numbers] = _Attempt(job, self._screen.open(job.name))
            self._crew.start(self._numbers, job, overwrite=overwrite, asks=self._watch is not None)

    def _next(self, source: Iterator[Job]) -> Job | None:
        """A job that can start: one that waited, else a new one. No more wait than could run."""
        if (ready := next(filter(self._is_ready, self._waiting), None)) is not None:
            self._waiting.remove(ready)
            return ready
        while len(self._waiting) < self._crew.slots and (job := next(source, None)) is not None:
            if self._is_ready(job):
                return job
            self._waiting.append(job)
        return None

    def _is_ready(self, job: Job) -> bool:
        """Whether the task-0 model is there, from this time: with ``overwrite`` a file may be of an earlier one."""
        return job.needs is None or job.needs in self._has_model

    def _take(self, number: int, message: Message) -> Finished | None:
        """What a message means for its job; the job's end, if it is that."""
        if (attempt := self._running.get(number)) is None:
            return None
        job = attempt.job
        if isinstance(message, Started | TaskDone | Done):
            self._begun.add(job)
            self._note_model(job)
        if isinstance(message, TaskDone):
            self._deaths[job] = 0
            if self._watch is not None:
                self._crew.reply(number, self._watch(job, message.task, message.aa))
        if not isinstance(message, Done | Failed | Died):
            show(message, attempt.display)
            return None
        del self._running[number]
        attempt.display.stop()
        return self._conclude(job, message)

    def _conclude(self, job: Job, message: Done | Failed | Died) -> Finished | None:
        if isinstance(message, Done):
            return self._completed(job)
        if isinstance(message, Failed):
            return self._end(Finished(job, error=message.error))
        self._deaths[job] += 1
        if self._deaths[job] <= self._retries:
            self._screen.note(f"{job.name}: {message.reason}; it continues from its checkpoint")
            self._waiting.insert(0, job)
            return None
        reason = (
            f"its process ended {self._deaths[job]} times in one task, the last time because {message.reason}; what it "
            f"saved is in {job.path}. Where memory was short, run fewer at once or lower train.batch_size"
        )
        return self._end(Finished(job, error=LostError(reason)))

    def _completed(self, job: Job) -> Finished:
        """The end of a job whose run is complete, with a report; of one whose files are damaged, too."""
        self._note_model(job)
        try:
            result = Result.load(job.path)
            if not result.report.exists():
                write_report(RunDirectory(job.path))
        except InfssmError as error:
            return self._end(Finished(job, error=error))
        return self._end(Finished(job, result))

    def _note_model(self, job: Job) -> None:
        if job.first_task.is_file():
            self._has_model.add(job)

    def _end(self, end: Finished) -> Finished:
        self._over.add(end.job)
        return end

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
