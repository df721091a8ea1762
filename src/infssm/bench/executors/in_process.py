"""One run after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from infssm.bench.executors.executor import Finished, StoppedError, Watch
from infssm.bench.experiment import Experiment
from infssm.bench.running import forget_task0, run
from infssm.learner.display import choose_screen
from infssm.learner.events import Control, Event, Interrupted, TaskEnded
from infssm.learner.result import Result


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
