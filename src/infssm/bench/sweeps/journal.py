"""The trials of a search in a file that any number of processes append to, on one machine or many.

Who works on a trial holds a lock on a folder of it, which the operating system takes back when the process dies: so a
trial belongs to one process at a time, and one that was left behind is taken up again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infssm._files import write_text
from infssm.bench.sweeps.propose import hopeless, propose
from infssm.bench.sweeps.space import Space
from infssm.errors import ConfigError
from infssm.learner.store.lock import locked

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_MOMENT = 0.05
"""Seconds between two looks at a lock."""


class Journal:
    """The trials of one search, in ``folder``; what is searched, ``facts``, must be what it was when it began."""

    def __init__(self, folder: Path, space: Space, facts: dict[str, Any], seed: int) -> None:
        self.folder, self._space, self._seed = folder, space, seed
        folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._check(facts)
            self._study = _open(folder / "journal.log")
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
            params = propose(self._space, trials, self._seed)
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
        return not hopeless(value, step, [other for other in self.trials() if other.state.is_finished()])

    def tell(self, number: int, value: float | None, error: str | None = None) -> None:
        """A trial is over, with its value, or without where it was stopped."""
        from optuna.trial import Trial, TrialState

        trial = self.trials()[number]
        if error is not None:
            Trial(self._study, trial._trial_id).set_user_attr("error", error)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        if value is None and not trial.intermediate_values:  # what tells a search that this was as bad as can be
            Trial(self._study, trial._trial_id).report(0.0, 0)
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
        except ConfigError:
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
            except ConfigError:
                time.sleep(_MOMENT)
        yield


class _Lock:
    """For Optuna, whose own lock outlives a process that is killed by half a minute."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._stack = folder, ExitStack()

    def acquire(self) -> bool:
        self._stack.enter_context(_waited(self._folder))
        return True

    def release(self) -> None:
        self._stack.close()


def _open(path: Path) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_Lock(path.parent / "writing")))  # type: ignore[arg-type]
    sampler = optuna.samplers.RandomSampler()  # never asked: settings come from `propose`
    return optuna.create_study(
        storage=storage, study_name="sweep", direction="maximize", sampler=sampler, load_if_exists=True
    )
