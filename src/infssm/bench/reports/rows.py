"""Rows of a comparison (one set-up over its seeds each), the verdict on them, and tests paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infssm._registry import suggest
from infssm.errors import ConfigError
from infssm.learner.metrics import ACCURACY, AccuracyMatrix, Quantity, Summary

_TESTED = ("aa", "fm")
_WILCOXON = 6
"""Seeds from which on Wilcoxon's test can reach p < 0.05: with five, its smallest two-sided p is 2/2⁵ = 0.0625."""


@dataclass(frozen=True)
class Row:
    """One set-up over its seeds.

    Attributes:
        benchmark: data set, number of tasks and model, followed by the settings that distinguish benchmarks with the
            same three.
        method: name of the method.
        label: the method, followed by the settings that distinguish set-ups of the same method.
        seeds: seeds of the runs, in increasing order.
        metrics: mean and standard deviation of every metric over the seeds; accuracies as fractions.
        matrices: one accuracy matrix per seed.
        names_per_task: class names of each task; empty if they were not recorded or differ between seeds.
    """

    benchmark: str
    method: str
    label: str
    seeds: tuple[int, ...]
    metrics: dict[str, Summary]
    matrices: tuple[AccuracyMatrix, ...]
    names_per_task: tuple[tuple[str, ...], ...] = ()

    @property
    def measure(self) -> Quantity:
        """The measure in the matrices."""
        return self.matrices[0].quantity

    @property
    def aa_curve(self) -> list[float]:
        """AA after every task, mean over seeds, as shown: in percent, bits or RMSE."""
        return [self.measure.scale * float(v) for v in np.mean([m.aa_curve for m in self.matrices], axis=0)]

    @property
    def aa_range(self) -> tuple[list[float], list[float]] | tuple[()]:
        """Lowest and highest AA of the seeds after every task, as shown; empty for one seed."""
        if len(self.matrices) < 2:
            return ()
        curves = self.measure.scale * np.array([m.aa_curve for m in self.matrices])
        return curves.min(0).tolist(), curves.max(0).tolist()

    @property
    def aa_error(self) -> float | None:
        """Standard error of the mean AA: over seeds, or of the test images where there is one seed.

        None if it is unknown: one seed without image counts, or one seed of a measure other than accuracy.
        """
        aa = self.metrics["aa"]
        if aa.std is not None:
            return aa.std / math.sqrt(aa.runs)
        if self.measure != ACCURACY:
            return None
        final = self.matrices[0].class_incremental
        variances = final.values[-1] * (1 - final.values[-1]) / final.samples
        error = float(np.sqrt(variances.sum())) / len(variances)
        return None if math.isnan(error) else error

    @property
    def forgetting(self) -> list[float]:
        """Forgetting per task, mean over seeds, as shown: in points, bits or RMSE."""
        return [
            self.measure.scale * float(v)
            for v in np.mean([m.class_incremental.forgetting_per_task() for m in self.matrices], axis=0)
        ]


def verdict(rows: Sequence[Row]) -> str:
    """The result of one benchmark in one sentence; empty if there is nothing to compare."""
    if len(rows) < 2 or any(math.isnan(row.metrics["fm"].mean) for row in rows):
        return ""
    # The baseline is plain sequential training in its best setting; there is none if all rows are of method seq.
    plain = [row for row in rows if row.method == "seq"]
    plain = [] if len(plain) == len(rows) else plain
    if rows[0].measure != ACCURACY:
        return _of_errors(rows, min(plain, key=_aa, default=None))
    best = max(rows, key=lambda row: (_aa(row), row in plain))  # a method that only ties with it does not beat it
    base = max(plain, key=_aa, default=None)
    aa, fm = _percent(best, "aa"), _percent(best, "fm")
    noise = _noise_clause(best, [row for row in rows if row is not best])
    if base is None:
        stable = min(rows, key=lambda row: _percent(row, "fm"))
        lowest = f"{stable.label} the lowest FM ({_percent(stable, 'fm'):.1f} points)"
        return f"{best.label} has the highest AA ({aa:.1f} %), {lowest}{noise}."
    base_aa, base_fm = _percent(base, "aa"), _percent(base, "fm")
    if best in plain:
        return (
            f"No method beats plain sequential training here (seq: AA {base_aa:.1f} %, FM {base_fm:.1f} points){noise}."
        )
    below = [row.label for row in rows if _percent(row, "aa") < base_aa and not _within_noise(base, row)]
    tail = f"; {_listed(below)} {'is' if len(below) == 1 else 'are'} below seq" if below else ""
    return (
        f"{best.label} has the highest AA: {aa:.1f} % against {base_aa:.1f} % for plain sequential training "
        f"({aa - base_aa:+.1f} points), with FM {fm:.1f} against {base_fm:.1f} points{noise}{tail}."
    )


def _of_errors(rows: Sequence[Row], base: Row | None) -> str:
    """The verdict where lower is better (bits, RMSE): the lowest row, compared with sequential training, ``base``."""
    best = min((row for row in rows if base is None or row.method != "seq"), key=_aa)
    seeds = "" if all(len(row.seeds) > 1 for row in rows) else "; one seed, so differences may be noise"
    forgotten = best.metrics["fm"].mean
    reached = f"{best.label} has {best.metrics['aa'].mean:.3f} {best.measure.title} and forgets {forgotten:.3f}"
    if base is None:
        return f"{reached}{seeds}."
    plain = base.metrics["fm"].mean
    newest = 100 * (best.metrics["newest"].mean / base.metrics["newest"].mean - 1)
    share = f" ({100 * forgotten / plain:.0f} % of it)" if plain > 0 else ""
    return (
        f"{reached}; plain sequential training has {base.metrics['aa'].mean:.3f} and forgets {plain:.3f}{share}. On "
        f"the newest task it takes {newest:+.1f} % {best.measure.unit}{seeds}."
    )


def _noise_clause(best: Row, others: list[Row]) -> str:
    """Which rows do not differ significantly from the best one, and by which standard errors."""
    alike = [row.label for row in others if _within_noise(best, row)]
    if alike:
        seeds = all(len(row.seeds) > 1 for row in (best, *others))
        errors = "over seeds" if seeds else "of one seed's test images"
        return f"; {_listed(alike)} cannot be told from it (AA within two standard errors {errors})"
    unknown = any(row.aa_error is None for row in (best, *others))
    return "; one seed, so differences may be noise" if unknown else ""


def _within_noise(one: Row, other: Row) -> bool:
    """Whether the mean AA of two rows differ by less than two standard errors of the difference."""
    if one.aa_error is None or other.aa_error is None:
        return False
    difference = abs(one.metrics["aa"].mean - other.metrics["aa"].mean)
    return difference <= 2 * math.hypot(one.aa_error, other.aa_error)


def _listed(labels: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def _percent(row: Row, measure: str) -> float:
    return 100 * row.metrics[measure].mean


def _aa(row: Row) -> float:
    return row.metrics["aa"].mean


@dataclass(frozen=True)
class PairedTest:
    """The difference ``first - second`` of one measure over the seeds that both have.

    Attributes:
        benchmark: name of the benchmark.
        first: label of the first set-up.
        second: label of the second set-up.
        measure: ``aa`` or ``fm``.
        unit: unit of the differences: points, bits or RMSE.
        seeds: seeds that both have.
        differences: one per seed, in that unit.
        t_test: two-sided p-value of the paired t-test; None for equal differences, where it is undefined.
        wilcoxon: two-sided p-value of Wilcoxon's signed-rank test; None for equal differences or fewer than six
            seeds.
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
            tests += filter(None, (_test(one, other, metric) for metric in _TESTED))
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
