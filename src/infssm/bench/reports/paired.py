"""A paired test between two set-ups: the difference of their measures seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infssm._registry import suggest
from infssm.bench.reports.row import Row
from infssm.errors import ConfigError

_MEASURES = ("aa", "fm")
_WILCOXON = 6
"""Seeds from which on Wilcoxon's test can reach p < 0.05: with five, its smallest two-sided p is 2/2⁵ = 0.0625."""


@dataclass(frozen=True)
class PairedTest:
    """The difference ``first - second`` of one measure over the seeds that both have.

    Attributes:
        benchmark: name of the benchmark.
        first: label of the first set-up.
        second: label of the second set-up.
        measure: ``aa`` or ``fm``.
        unit: unit of the differences, points or bits.
        seeds: seeds that both have.
        differences: one per seed, in that unit.
        t_test: two-sided p-value of the paired t-test; None for equal differences, where it is undefined.
        wilcoxon: two-sided p-value of Wilcoxon's signed-rank test; None for fewer than six seeds.
    """

    benchmark: str
    first: str
    second: str
    measure: str
    unit: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    t_test: float | None
    wilcoxon: float | None

    @property
    def mean(self) -> float:
        """Mean difference."""
        return float(np.mean(self.differences))

    @property
    def error(self) -> float:
        """Standard error of the mean difference."""
        return float(np.std(self.differences, ddof=1)) / math.sqrt(len(self.differences))

    def sentence(self) -> str:
        """The result as a sentence."""
        digits = 2 if self.unit == "points" else 3
        names = {"aa": f"Mean {self.unit}", "fm": "Forgetting"}
        name = self.measure.upper() if self.unit == "points" else names[self.measure]
        each = ", ".join(f"{d:+.{digits}f}" for d in self.differences)
        named = {"paired t-test": self.t_test, "Wilcoxon signed-rank test": self.wilcoxon}
        tests = [f"{test} p = {p:.2g}" for test, p in named.items() if p is not None]
        few = len(self.seeds) < 3
        caution = " Two seeds are too few for a conclusion: run more, such as --seed 0 10 100." if few else ""
        return (
            f"{name} of {self.first} minus {self.second}, paired over {len(self.seeds)} seeds: "
            f"{self.mean:+.{digits}f} {self.unit}, standard error {self.error:.{digits}f} "
            f"({each}; {', '.join(tests) or 'the same for every seed, so no test applies'}).{caution}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.__dict__ | {"mean": self.mean, "standard_error": self.error}


def paired_tests(rows: Sequence[Row], first: str, second: str) -> list[PairedTest]:
    """Compare two set-ups, given by label or by method, on every benchmark that has both with two seeds in common."""
    tests: list[PairedTest] = []
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        own = [row for row in rows if row.benchmark == benchmark]
        one, other = _named(own, first), _named(own, second)
        if one is not None and other is not None:
            tests += filter(None, (_test(one, other, measure) for measure in _MEASURES))
    if not tests:
        for name in (first, second):
            labels = {known for row in rows for known in (row.label, row.method)}
            if name not in labels:
                raise ConfigError(f"no run of {name!r} was found{suggest(name, labels)}")
        raise ConfigError(
            f"{first!r} and {second!r} have fewer than two seeds in common: run both with --seed 0 10 100"
        )
    return tests


def _named(rows: Sequence[Row], name: str) -> Row | None:
    matches = [row for row in rows if row.label == name] or [row for row in rows if row.method == name]
    if len(matches) > 1:
        raise ConfigError(f"{name!r} has several set-ups; choose one: {'; '.join(row.label for row in matches)}")
    return matches[0] if matches else None


def _test(one: Row, other: Row, measure: str) -> PairedTest | None:
    values = [dict(zip(row.seeds, (m.summary()[measure] for m in row.matrices), strict=True)) for row in (one, other)]
    seeds = tuple(seed for seed in one.seeds if seed in values[1])
    differences = one.measure.scale * np.array([values[0][seed] - values[1][seed] for seed in seeds])
    if len(seeds) < 2 or not np.isfinite(differences).all():
        return None
    try:
        from scipy import stats
    except ImportError:
        raise ConfigError("the paired test needs SciPy: pip install 'infssm[bench]'") from None
    t_test = wilcoxon = None
    if np.ptp(differences) > 1e-12:
        t_test = float(stats.ttest_1samp(differences, 0.0).pvalue)
        if len(seeds) >= _WILCOXON:
            wilcoxon = float(stats.wilcoxon(differences).pvalue)
    names = one.benchmark, one.label, other.label, measure, one.measure.change
    return PairedTest(*names, seeds, tuple(differences.tolist()), t_test, wilcoxon)
