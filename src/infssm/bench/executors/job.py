"""What an executor is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infssm.bench.running import run_path
from infssm.errors import InfssmError
from infssm.learner.config.fields import RunConfig
from infssm.learner.result import Result
from infssm.learner.store.directory import RunDirectory

Watch = Callable[["Job", int, float], bool]
"""Called with a job, a task and the AA after it; False ends the run there (it can be resumed)."""


class StoppedError(InfssmError):
    """A run that ``watch`` ended after one of its tasks."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run to carry out. Two jobs are the same only if they are one object.

    Attributes:
        config: what to run.
        needs: the job whose task-0 model this one starts from; None where it trains task 0 itself. It has to come
            before this one.
        label: what tells it from the other jobs of its plan; empty: method and seed.
    """

    config: RunConfig
    needs: Job | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """How people are told of it."""
        return self.label or f"{self.config.method.name} seed {self.config.seed}"

    @property
    def ready(self) -> bool:
        """Whether the task-0 model it starts from is there."""
        return self.needs is None or self.needs.first_task.is_file()

    @property
    def settled(self) -> RunConfig:
        """The configuration with the task-0 model of the job it needs, which must be there."""
        if self.needs is None:
            return self.config
        start = self.config.train.model_copy(update={"task0": str(self.needs.first_task.resolve())})
        return self.config.model_copy(update={"train": start})

    @property
    def path(self) -> Path:
        """Its run directory; known once it is ready, for it depends on the weights it starts from."""
        return run_path(self.settled)

    @property
    def first_task(self) -> Path:
        """Where its task-0 model is, or will be."""
        return RunDirectory(self.path).weights_path(0)


@dataclass(frozen=True)
class Finished:
    """A job that is over: with its result, or with the error that ended it."""

    job: Job
    result: Result | None = None
    error: Exception | None = None


class Executor(Protocol):
    """Carries out jobs."""

    def run(
        self, jobs: Iterable[Job], *, overwrite: bool = False, quiet: bool = False, watch: Watch | None = None
    ) -> Iterator[Finished]:
        """Carry out jobs and yield each when it is over, in the order of their ends.

        Jobs are taken from ``jobs`` one at a time, when there is room to start one, and after everything that is over
        has been yielded: what comes next may depend on results so far. One that fails does not stop the others. What
        is complete is not repeated, what is unfinished continues; ``overwrite`` starts over instead. Ctrl-C and SIGTERM
        save all runs and raise :class:`~infssm.learner.Interrupted`.
        """
        ...


def needed_failed(job: Job) -> InfssmError:
    """What to tell of a job whose task-0 model could not be made."""
    return InfssmError(f"it needs task 0 of {job.needs.name}, which failed" if job.needs else "")


def gather(executor: Executor, jobs: Iterable[Job], *, overwrite: bool = False, quiet: bool = False) -> list[Finished]:
    """Carry out all jobs; what became of each, in the order in which they were given."""
    jobs = list(jobs)
    over = {end.job: end for end in executor.run(jobs, overwrite=overwrite, quiet=quiet)}
    return [over[job] for job in jobs]


def results(ends: Iterable[Finished]) -> list[Result]:
    """The results of jobs; where some failed, an error of the first one's kind that names all of them."""
    ends = list(ends)
    failed = [(end.job, end.error) for end in ends if end.error is not None]
    if not failed:
        return [end.result for end in ends if end.result is not None]
    first = failed[0][1]
    if len(ends) == 1 or not isinstance(first, InfssmError):
        raise first
    lines = [f"{job.name}: {error}" for job, error in failed]
    rest = "the same command carries out what is missing"
    raise type(first)(f"{len(failed)} of {len(ends)} runs failed; {rest}\n" + "\n".join(lines)) from first
