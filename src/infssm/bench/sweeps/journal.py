"""The trials of a search in a file that any number of processes append to, on one machine or many.

Who works on a trial holds a lock on a folder of it, which the operating system takes back when the process dies: so a
trial belongs to one process at a time, and one that was left behind is taken up again.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infssm._files import write_text
from infssm.bench.sweeps.propose import hopeless, propose
from infssm.bench.sweeps.space import Space
from infssm.errors import ConfigError
from infssm.learner.store.lock import InUseError, locked

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_MOMENT = 0.05
"""Seconds between two looks at a lock."""


class Journal:
    """The trials of one search, in ``folder``; what is searched, ``facts``, must be what it was when it began.

    ``better`` is 1 where higher values of the objective are better, -1 where lower ones are (bits per byte).
    """

    def __init__(self, folder: Path, space: Space, facts: dict[str, Any], seed: int, better: int = 1) -> None:
        self.folder, self._space, self._seed, self._better = folder, space, seed, better
        folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._check(facts)
            self._study = _open(folder / "journal.log", better)
        self._mine: dict[int, ExitStack] = {}

    def _check(self, facts: dict[str, Any]) -> None:
        path = self.folder / "sweep.json"
        if not path.exists():
            write_text(path, json.dumps(facts, indent=2) + "\n")
        elif json.loads(path.read_text()) != facts:
            raise ConfigError(f"{path} belongs to another search: choose another --out")

    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers."""
        return self._study.get_trials(deepcopy=False)

    def take(self, budget: int | None) -> FrozenTrial | None:
        """A trial to work on: one that was left behind, or a new one while there are fewer than ``budget``.

        None where nothing is to be done: all are done, or others work on them.
        """
        from optuna.trial import TrialState, create_trial

        with self._alone():
            trials = self.trials()
            for trial in trials:
                if trial.state == TrialState.RUNNING and self._claim(trial.number):
                    return trial
            if budget is not None and len(trials) >= budget:
                return None
            params = propose(self._space, trials, self._seed, self._better)
            if params is None:
                return None
            distributions = {key: dimension.distribution() for key, dimension in self._space.items()}
            self._study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=distributions))
            trial = self.trials()[-1]
            if trial.number != len(trials) or not self._claim(trial.number):
                raise ConfigError(f"{self.folder} is written to by something else than this search")
            return trial

    def working(self) -> list[FrozenTrial]:
        """Trials that are not over."""
        return [trial for trial in self.trials() if not trial.state.is_finished()]

    def report(self, number: int, step: int, value: float) -> bool:
        """Note a value of a trial that is being worked on; False where it is not worth going on."""
        from optuna.trial import Trial

        trial = self.trials()[number]
        if step not in trial.intermediate_values:
            Trial(self._study, trial._trial_id).report(value, step)
        finished = [other for other in self.trials() if other.state.is_finished()]
        return not hopeless(value, step, finished, self._better)

    def tell(self, number: int, value: float | None, error: str | None = None) -> None:
        """A trial is over, with its value, or without where it was stopped."""
        from optuna.trial import Trial, TrialState

        trial = self.trials()[number]
        if error is not None:
            Trial(self._study, trial._trial_id).set_user_attr("error", error)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        if value is None and not trial.intermediate_values:  # it diverged: the search has to see the worst value
            Trial(self._study, trial._trial_id).report(0.0 if self._better > 0 else math.inf, 0)
        self._study.tell(number, value, state=state)
        self._mine.pop(number).close()

    def let_go(self) -> None:
        """Leave what is unfinished to others."""
        while self._mine:
            self._mine.popitem()[1].close()

    def _claim(self, number: int) -> bool:
        if number in self._mine:
            return False
        folder, stack = self.folder / "claims" / f"{number:05}", ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(locked(folder))
        except InUseError:
            return False
        self._mine[number] = stack
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with _waited(self.folder):
            yield


@contextlib.contextmanager
def _waited(folder: Path) -> Iterator[None]:
    """A lock that one waits for."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except InUseError:  # any other error means that the lock can never be taken
                time.sleep(_MOMENT)
        yield


class _Lock:
    """The lock for appending to ``journal``. Optuna's own lock outlives a killed process by half a minute."""

    def __init__(self, journal: Path) -> None:
        self._journal, self._folder, self._stack = journal, journal.parent / "writing", ExitStack()
        self._folder.mkdir(exist_ok=True)

    def acquire(self) -> bool:
        self._stack.enter_context(_waited(self._folder))
        self._drop_torn_line()
        return True

    def _drop_torn_line(self) -> None:
        """Cut off a last line without its end, left by a process that was killed while it wrote.

        Only the holder of this lock appends, so nobody is writing the line now; the next one would be glued to it.
        """
        with open(self._journal, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def release(self) -> None:
        self._stack.close()


def _open(path: Path, better: int) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_Lock(path)))  # type: ignore[arg-type]
    sampler = optuna.samplers.RandomSampler()  # never asked: settings come from `propose`
    return optuna.create_study(
        storage=storage,
        study_name="sweep",
        direction="maximize" if better > 0 else "minimize",
        sampler=sampler,
        load_if_exists=True,
    )
