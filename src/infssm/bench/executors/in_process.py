"""One run after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infssm.bench.executors.job import Finished, StoppedError, Watch
from infssm.bench.experiment import Experiment
from infssm.bench.running import forget_task0, run
from infssm.learner.display import Display, choose_screen
from infssm.learner.signals import Interrupted


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
        renewed: set[Path | None] = set()
        for experiment in experiments:
            try:
                if overwrite and experiment.task0_weights not in renewed:
                    renewed.add(experiment.task0_weights)
                    forget_task0(experiment)
                display = None if watch is None else _Watched(choose_screen(quiet).open(), experiment, watch)
                finished = Finished(experiment, run(experiment, overwrite=overwrite, quiet=quiet, display=display))
            except Interrupted:
                raise
            except Exception as error:  # the other runs have nothing to do with it
                finished = Finished(experiment, error=error)
            yield finished


class _Watched(Display):
    """A display that asks after each task whether to go on."""

    def __init__(self, display: Display, experiment: Experiment, watch: Watch) -> None:
        self._display, self._experiment, self._watch = display, experiment, watch

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self._display.start(title, steps, done)

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        self._display.step(done, where, terms, images_per_s)

    def task_done(self, task: int, aa: float) -> None:
        if not self._watch(self._experiment, task, aa):
            raise StoppedError(f"stopped after task {task}")

    def note(self, text: str) -> None:
        self._display.note(text)

    def stop(self) -> None:
        self._display.stop()
