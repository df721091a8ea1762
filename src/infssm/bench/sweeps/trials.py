"""The trials of a search in a folder that any number of processes share, on one machine or many.

A trial is one JSON file, written only by the process that holds the lock on the trial's claim. The operating system
takes that lock back when the process dies: so a trial belongs to one process at a time, and one that was left behind is
taken up again. New trials are added under a lock on the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infssm._files import write_text
from infssm.bench.sweeps.space import Space, overrides_of
from infssm.errors import ConfigError
from infssm.learner.store.layout import InUseError, locked

STARTUP = 8
"""Trials drawn at random before TPE learns from them."""
_ATTEMPTS = 50
"""Draws until one differs from all trials."""
_PATIENCE = 5
"""Finished trials there must be before one is stopped for being worse than they were."""


@dataclass(frozen=True)
class Trial:
    """Settings that are tried, and what they gave.

    Attributes:
        number: number, from 0.
        params: value of each searched setting.
        state: ``stopped`` trials were worse than others on the way, or diverged.
        value: the objective, of a complete trial.
        reports: the objective after each step, a task of one of the seeds.
        error: why it diverged.
    """

    number: int
    params: dict[str, Any]
    state: Literal["running", "complete", "stopped"] = "running"
    value: float | None = None
    reports: dict[int, float] = field(default_factory=dict)
    error: str | None = None


class Trials:
    """The trials of one search, in ``folder``; what is searched, ``identity``, must be what it was when it began.

    ``better`` is 1 where higher values of the objective are better, -1 where lower ones are (bits per byte).
    """

    def __init__(self, folder: Path, space: Space, identity: dict[str, Any], seed: int, better: int = 1) -> None:
        self.folder, self._space, self._seed, self._better = folder, space, seed, better
        self._finished: dict[int, Trial] = {}
        self._claims: dict[int, ExitStack] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "sweep.json"
        with locked(folder, wait=True):
            if not path.exists():
                write_text(path, json.dumps(identity, indent=2) + "\n")
            elif json.loads(path.read_text()) != identity:
                raise ConfigError(f"{path} belongs to another search: choose another --out")

    def all(self) -> list[Trial]:
        """All trials, in the order of their numbers."""
        return [self._read(number) for number in range(len(list(self.folder.glob("trials/*.json"))))]

    def take(self, budget: int | None) -> Trial | None:
        """A trial to work on: one that was left behind, or a new one while there are fewer than ``budget``.

        None if nothing is to be done: all are done, or others work on them.
        """
        with locked(self.folder, wait=True):
            trials = self.all()
            for trial in trials:
                if trial.state == "running" and self._claim(trial.number):
                    return trial
            if budget is not None and len(trials) >= budget:
                return None
            params = propose(self._space, trials, self._seed, self._better)
            if params is None:
                return None
            trial = Trial(len(trials), params)
            self._claim(trial.number)
            self._write(trial)
            return trial

    def report(self, number: int, step: int, value: float) -> bool:
        """Note a value of a trial that is being worked on; False where it is not worth going on."""
        trial = self._read(number)
        if step not in trial.reports:
            self._write(replace(trial, reports=trial.reports | {step: value}))
        finished = [other for other in self.all() if other.state != "running"]
        return not hopeless(value, step, finished, self._better)

    def tell(self, number: int, value: float | None, error: str | None = None) -> None:
        """Store the end of a trial: its value, or None if it was stopped."""
        trial = self._read(number)
        reports = trial.reports
        if value is None and not reports:  # it diverged: the search has to see the worst value
            reports = {0: 0.0 if self._better > 0 else math.inf}
        state: Literal["complete", "stopped"] = "stopped" if value is None else "complete"
        self._write(replace(trial, state=state, value=value, error=error, reports=reports))
        self._claims.pop(number).close()

    def release(self) -> None:
        """Release unfinished trials, so that other processes can take them."""
        while self._claims:
            self._claims.popitem()[1].close()

    def _path(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:05}.json"

    def _read(self, number: int) -> Trial:
        if number not in self._finished:
            values = json.loads(self._path(number).read_bytes())
            values["reports"] = {int(step): value for step, value in values["reports"].items()}
            trial = Trial(**values)
            if trial.state == "running":
                return trial
            self._finished[number] = trial  # nothing changes it any more
        return self._finished[number]

    def _write(self, trial: Trial) -> None:
        self._path(trial.number).parent.mkdir(exist_ok=True)
        write_text(self._path(trial.number), json.dumps(asdict(trial)) + "\n")

    def _claim(self, number: int) -> bool:
        if number in self._claims:
            return False
        folder, claim = self.folder / "claims" / f"{number:05}", ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            claim.enter_context(locked(folder))
        except InUseError:
            return False
        self._claims[number] = claim
        return True


def hopeless(value: float, step: int, finished: Sequence[Trial], better: int = 1) -> bool:
    """Whether a trial with ``value`` at ``step`` is worse than the median of the finished ones there.

    Optuna's own rule takes a trial's best value so far, which does not apply here: accuracy falls from task to task.
    """
    others = [trial.reports[step] for trial in finished if step in trial.reports]
    return len(others) >= _PATIENCE and better * value < better * statistics.median(others)


def propose(space: Space, trials: Sequence[Trial], seed: int, better: int = 1) -> dict[str, Any] | None:
    """Settings for trial number ``len(trials)``, unlike all others; None if none are left.

    The result depends on the seed and the trials alone, so a search that was interrupted proposes what it would have
    proposed. ``better`` is 1 where higher values are better, -1 where lower ones are.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    tried = {tuple(overrides_of(space, trial.params)) for trial in trials}
    distributions: dict[str, optuna.distributions.BaseDistribution] = dict(space)
    states = {"running": TrialState.RUNNING, "complete": TrialState.COMPLETE, "stopped": TrialState.PRUNED}
    for attempt in range(_ATTEMPTS):
        digest = hashlib.sha256(repr((seed, len(trials), attempt)).encode()).digest()
        fresh = int.from_bytes(digest[:4], "big")
        sampler: optuna.samplers.BaseSampler
        if attempt < _ATTEMPTS // 2:
            sampler = optuna.samplers.TPESampler(seed=fresh, n_startup_trials=STARTUP)
        else:  # TPE insists on what it has seen
            sampler = optuna.samplers.RandomSampler(seed=fresh)
        study = optuna.create_study(direction="maximize" if better > 0 else "minimize", sampler=sampler)
        for trial in trials:
            known = create_trial(
                state=states[trial.state],
                value=trial.value,
                params=trial.params,
                distributions=distributions,
                intermediate_values=trial.reports,
            )
            study.add_trial(known)
        params = study.ask(distributions).params
        if tuple(overrides_of(space, params)) not in tried:
            return params
    return None
