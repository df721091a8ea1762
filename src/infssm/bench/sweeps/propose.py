"""The next settings to try, from those tried so far: TPE, and a pure function of what it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infssm.bench.sweeps.space import Space, overrides_of

if TYPE_CHECKING:
    from infssm.bench.sweeps.trials import Trial

STARTUP = 8
"""Trials drawn at random before anything is learnt from them."""
_ATTEMPTS = 50


def propose(space: Space, trials: Sequence[Trial], seed: int, better: int = 1) -> dict[str, Any] | None:
    """Settings for trial number ``len(trials)``, unlike all others; None where there are none left.

    The result depends on the seed and the trials alone, so a search that was interrupted proposes what it would have
    proposed. ``better`` is 1 where higher values are better, -1 where lower ones are.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    tried = {tuple(overrides_of(space, trial.params)) for trial in trials}
    distributions = {key: part.distribution() for key, part in space.items()}
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
