"""One run after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from infssm.bench.executors.job import Finished, Job, StoppedError, Watch, needed_failed
from infssm.bench.running import run
from infssm.learner.display import Display, choose_screen
from infssm.learner.signals import Interrupted


class InProcess:
    """Carries out jobs one after the other, here; under torchrun, on all of its processes together."""

    def run(
        self, jobs: Iterable[Job], *, overwrite: bool = False, quiet: bool = False, watch: Watch | None = None
    ) -> Iterator[Finished]:
        """See :class:`Executor`."""
        for job in jobs:
            try:
                if not job.ready:
                    raise needed_failed(job)
                display = None if watch is None else _Watched(choose_screen(quiet).open(), job, watch)
                finished = Finished(job, run(job.settled, overwrite=overwrite, quiet=quiet, display=display))
            except Interrupted:
                raise
            except Exception as error:  # the other runs have nothing to do with it
                finished = Finished(job, error=error)
            yield finished


class _Watched(Display):
    """A display that asks after each task whether to go on."""

    def __init__(self, display: Display, job: Job, watch: Watch) -> None:
        self._display, self._job, self._watch = display, job, watch

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self._display.start(title, steps, done)

    def step(self, done: int, where: str, terms: Mapping[str, float], images_per_s: float) -> None:
        self._display.step(done, where, terms, images_per_s)

    def task_done(self, task: int, aa: float) -> None:
        if not self._watch(self._job, task, aa):
            raise StoppedError(f"stopped after task {task}")

    def note(self, text: str) -> None:
        self._display.note(text)

    def stop(self) -> None:
        self._display.stop()
