"""The protocol of executors, from experiments to results, and the one that runs them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infssm.bench.experiment import Experiment
from infssm.bench.running import forget_task0, run
from infssm.errors import InfssmError
from infssm.learner.events import Control, Event, Interrupted, TaskEnded, choose_screen
from infssm.learner.result import Result

Watch = Callable[[Experiment, int, float], bool]
"""Called with an experiment, a task and the AA after it; False ends the run there (it can be resumed)."""


class StoppedError(InfssmError):
    """A run that ``watch`` ended after one of its tasks."""


@dataclass(frozen=True)
class Finished:
    """An experiment that is over: with its result, or with the error that ended it."""

    experiment: Experiment
    result: Result | None = None
    error: Exception | None = None


class Executor(Protocol):
    """Carries out experiments."""

    def run(
        self,
        experiments: Iterable[Experiment],
        *,
        overwrite: bool = False,
        quiet: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[Finished]:
        """Carry out experiments and yield each when it is over, in the order of their ends.

        They are taken from ``experiments`` one at a time, when a slot is free, and after everything that
        is over has been yielded: what comes next may depend on results so far. One that fails does not stop the
        others. What is complete is not repeated, what is unfinished continues; ``overwrite`` starts over instead.
        Ctrl-C and SIGTERM save all runs and raise :class:`~infssm.learner.Interrupted`.
        """
        ...


class InProcess:
    """Carries out experiments one after the other, here; under torchrun, on all of its processes together."""

    def run(
        self,
        experiments: Iterable[Experiment],
        *,
        overwrite: bool = False,
        quiet: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[Finished]:
        """See :class:`Executor`."""
        renewed: set[Path] = set()
        for experiment in experiments:
            try:
                if overwrite:
                    renew(experiment, renewed)
                finished = Finished(experiment, self._run(experiment, watch, overwrite=overwrite, quiet=quiet))
            except Interrupted:
                raise
            except Exception as error:  # the other runs have nothing to do with it
                finished = Finished(experiment, error=error)
            yield finished

    def _run(self, experiment: Experiment, watch: Watch | None, *, overwrite: bool, quiet: bool) -> Result:
        if watch is None:
            return run(experiment, overwrite=overwrite, quiet=quiet)
        display, control, stopped = choose_screen(quiet).open(), Control(), []

        def listen(event: Event) -> None:
            display(event)
            if isinstance(event, TaskEnded) and not watch(experiment, event.task, event.average):
                stopped.append(event.task)
                control.stop()

        try:
            return run(experiment, overwrite=overwrite, listen=listen, control=control)
        except Interrupted:
            if stopped:
                raise StoppedError(f"stopped after task {stopped[0] + 1}") from None
            raise


def renew(experiment: Experiment, renewed: set[Path]) -> None:
    """Remove the shared task-0 model that an experiment starts from, once for all that do."""
    if experiment.task0_weights is not None and experiment.task0_weights not in renewed:
        renewed.add(experiment.task0_weights)
        forget_task0(experiment)


def gather(
    executor: Executor, experiments: Iterable[Experiment], *, overwrite: bool = False, quiet: bool = False
) -> list[Finished]:
    """Carry out all experiments; what became of each, in the order in which they were given."""
    experiments = list(experiments)
    over = {end.experiment: end for end in executor.run(experiments, overwrite=overwrite, quiet=quiet)}
    return [over[experiment] for experiment in experiments]


def results(ends: Iterable[Finished]) -> list[Result]:
    """The results of experiments; where some failed, an error of the first one's kind that names all of them."""
    ends = list(ends)
    failed = [(end.experiment, end.error) for end in ends if end.error is not None]
    if not failed:
        return [end.result for end in ends if end.result is not None]
    first = failed[0][1]
    if len(ends) == 1 or not isinstance(first, InfssmError):
        raise first
    lines = [f"{experiment.name}: {error}" for experiment, error in failed]
    rest = "the same command carries out what is missing"
    raise type(first)(f"{len(failed)} of {len(ends)} runs failed; {rest}\n" + "\n".join(lines)) from first
