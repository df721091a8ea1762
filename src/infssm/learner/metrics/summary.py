"""Mean and spread over repeated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infssm.errors import ConfigError
from infssm.learner.metrics.matrix import AccuracyMatrix


@dataclass(frozen=True)
class Summary:
    """One measure over several runs.

    Attributes:
        mean: mean over runs.
        std: sample standard deviation (ddof = 1); None for a single run.
        runs: how many runs.
    """

    mean: float
    std: float | None
    runs: int

    def format(self, *, scale: float = 100.0, digits: int = 2) -> str:
        """``"53.21 ± 0.40"``, in percent by default; ``"-"`` where the measure is undefined."""
        if math.isnan(self.mean):
            return "-"
        mean = f"{self.mean * scale:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std * scale:.{digits}f}"


def summarize(results: Sequence[Mapping[str, float] | AccuracyMatrix]) -> dict[str, Summary]:
    """Mean and sample standard deviation of every measure over runs, usually one per seed.

    Args:
        results: accuracy matrices, or mappings from measure to value; all with the same measures.
    """
    if not results:
        raise ConfigError("nothing to summarize: pass at least one result")
    rows = [result.summary() if isinstance(result, AccuracyMatrix) else result for result in results]
    for row in rows[1:]:
        if row.keys() != rows[0].keys():
            differing = sorted(row.keys() ^ rows[0].keys())
            raise ConfigError(f"results must hold the same measures; these are not in all of them: {differing}")
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        found[name] = Summary(float(np.mean(values)), std, len(values))
    return found
