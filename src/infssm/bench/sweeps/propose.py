"""The next settings to try, from those tried so far: TPE, and a pure function of what it is given."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infssm.bench.sweeps.space import Space, overrides_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STARTUP = 8
"""Trials drawn at random before anything is learnt from them."""
_ATTEMPTS = 50
_PATIENCE = 5
"""Finished trials there must be before one is stopped for being worse than they were."""


def propose(space: Space, trials: Sequence[FrozenTrial], seed: int, better: int = 1) -> dict[str, Any] | None:
    """Settings for trial number ``len(trials)``, unlike all others; None where there are none left.

    The result depends on the seed and the trials alone, so a search that was interrupted proposes what it would have
    proposed. ``better`` is 1 where higher values are better, -1 where lower ones are.
    """
    import optuna

    tried = {tuple(overrides_of(space, trial.params)) for trial in trials}
    distributions = {key: part.distribution() for key, part in space.items()}
    for attempt in range(_ATTEMPTS):
        fresh = _seed(seed, len(trials), attempt)
        sampler: optuna.samplers.BaseSampler
        if attempt < _ATTEMPTS // 2:
            sampler = optuna.samplers.TPESampler(seed=fresh, n_startup_trials=STARTUP)
        else:  # TPE insists on what it has seen
            sampler = optuna.samplers.RandomSampler(seed=fresh)
        study = optuna.create_study(direction="maximize" if better > 0 else "minimize", sampler=sampler)
        study.add_trials([_known(trial) for trial in trials])
        params = study.ask(distributions).params
        if tuple(overrides_of(space, params)) not in tried:
            return params
    return None


def _known(trial: FrozenTrial) -> FrozenTrial:
    from optuna.trial import create_trial

    return create_trial(
        state=trial.state,
        value=trial.value,
        params=trial.params,
        distributions=trial.distributions,
        intermediate_values=trial.intermediate_values,
    )


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def hopeless(value: float, step: int, finished: Sequence[FrozenTrial], better: int = 1) -> bool:
    """Whether a trial with ``value`` at ``step`` is worse than the median of the finished ones there.

    Optuna's own rule takes a trial's best value so far, which is no measure here: accuracy falls from task to task.
    """
    others = [trial.intermediate_values[step] for trial in finished if step in trial.intermediate_values]
    return len(others) >= _PATIENCE and better * value < better * statistics.median(others)
