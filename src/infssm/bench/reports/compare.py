"""Several runs side by side: mean and spread over seeds, as data and as one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infssm.errors import ConfigError
from infssm.learner.metrics import ACCURACY, AccuracyMatrix, Measure, Summary, summarize
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.settings import counting

_NOT_COMPARED = ("seed", "method.name", "train.task0")
"""Settings that decide results, but do not make another set-up, or stand in a column of their own."""


_PROTOCOL = ("data.", "model.", "train.epochs", "train.task0_epochs", "train.limit_batches")
"""Settings that say what is learnt from what; runs that differ in them are never ranked against each other."""


@dataclass(frozen=True)
class Row:
    """One set-up over its seeds.

    Attributes:
        benchmark: data set, tasks and model, with what tells its protocol from others of that name.
        label: the method, with the settings that tell it from others of that name.
        seeds: of the runs behind it.
        measures: every measure as mean and spread, fractions.
        matrices: one accuracy matrix per seed.
        names_per_task: class names of each task; empty where they were not recorded or differ between seeds.
    """

    benchmark: str
    label: str
    seeds: tuple[int, ...]
    measures: dict[str, Summary]
    matrices: tuple[AccuracyMatrix, ...]
    names_per_task: tuple[tuple[str, ...], ...] = ()

    @property
    def measure(self) -> Measure:
        """What the matrices hold."""
        return self.matrices[0].measure

    @property
    def aa_curve(self) -> list[float]:
        """AA after every task, mean over seeds, as shown: in percent, or bits."""
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

        Unknown (None) for one seed without image counts.
        """
        aa = self.measures["aa"]
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
        """Forgetting per task, mean over seeds, as shown: in points, or bits."""
        return [
            self.measure.scale * float(v)
            for v in np.mean([m.class_incremental.forgetting_per_task() for m in self.matrices], axis=0)
        ]


@dataclass(frozen=True)
class Comparison:
    """Rows of all set-ups, benchmark by benchmark, in the order the runs were given."""

    rows: tuple[Row, ...]

    @property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks, each once."""
        return list(dict.fromkeys(row.benchmark for row in self.rows))

    def of(self, benchmark: str) -> list[Row]:
        """Rows of one benchmark."""
        return [row for row in self.rows if row.benchmark == benchmark]

    def verdict(self) -> str:
        """What the comparison shows, in a sentence per benchmark."""
        return " ".join(sentence for b in self.benchmarks if (sentence := _verdict(self.of(b))))


def compare(runs: Sequence[RunDirectory]) -> Comparison:
    """Group complete runs by everything but their seed and summarize each group."""
    if not runs:
        raise ConfigError("there are no complete runs to compare")
    groups: dict[str, list[tuple[RunDirectory, dict[str, Any]]]] = {}
    for run in runs:
        config = run.config()
        groups.setdefault(_setup(config), []).append((run, config))
    configs = [members[0][1] for members in groups.values()]
    rows = [
        _row(members, _benchmark(members[0][1], configs), _label(members[0][1], configs)) for members in groups.values()
    ]
    order = list(dict.fromkeys(row.benchmark for row in rows))
    return Comparison(tuple(sorted(rows, key=lambda row: order.index(row.benchmark))))


def _row(members: list[tuple[RunDirectory, dict[str, Any]]], benchmark: str, label: str) -> Row:
    matrices = tuple(run.matrix() for run, _ in members)
    seeds = tuple(config["seed"] for _, config in members)
    found = {tuple(run.names_per_task()) for run, _ in members}
    return Row(benchmark, label, seeds, summarize(matrices), matrices, found.pop() if len(found) == 1 else ())


def _task(config: dict[str, Any]) -> str:
    part = ", on validation data" if config["data"].get("evaluate") == "val" else ""
    return f"{config['data']['name']}, {config['data']['num_tasks']} tasks, {config['model']['name']}{part}"


def _benchmark(config: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Data set, tasks and model, and in brackets what tells its protocol from others with the same ones."""
    alike = [_protocol(other) for other in others if _task(other) == _task(config)]
    shown = _differing(_protocol(config), alike)
    return f"{_task(config)} ({', '.join(shown)})" if shown else _task(config)


def _setup(config: dict[str, Any]) -> str:
    """Key under which the seeds of one set-up meet."""
    return json.dumps([config["method"]["name"], _task(config), sorted(_compared(config).items())], default=str)


def _label(config: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The method's name, and in brackets what tells it from other set-ups of the same method and benchmark."""
    name: str = config["method"]["name"]
    same = [c for c in others if c["method"]["name"] == name and _protocol(c) == _protocol(config)]
    shown = _differing(_compared(config), [_compared(c) for c in same])
    return f"{name} ({', '.join(shown)})" if shown else name


def _differing(mine: dict[str, Any], theirs: list[dict[str, Any]]) -> list[str]:
    """``key=value`` of those settings in which a set-up differs from others."""
    keys = dict.fromkeys(key for values in theirs for key in values)
    differing = [k for k in keys if len({str(values.get(k)) for values in theirs}) > 1 and k in mine]
    return [f"{key.removeprefix('method.')}={mine[key]}" for key in differing]


def _protocol(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _compared(config).items() if k.startswith(_PROTOCOL)}


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counting(config).items() if name not in _NOT_COMPARED}


def _verdict(rows: list[Row]) -> str:
    if len(rows) < 2 or any(math.isnan(row.measures["fm"].mean) for row in rows):
        return ""
    if rows[0].measure != ACCURACY:
        return _verdict_bits(rows)
    best = max(rows, key=lambda row: row.measures["aa"].mean)
    base = next((row for row in rows if row.label == "seq"), None)
    aa, fm = _percent(best, "aa"), _percent(best, "fm")
    noise = _noise_clause(best, [row for row in rows if row is not best])
    if base is None:
        calmest = min(rows, key=lambda row: row.measures["fm"].mean)
        lowest = _percent(calmest, "fm")
        return (
            f"{best.label} has the highest AA ({aa:.1f} %), {calmest.label} the lowest FM ({lowest:.1f} points){noise}."
        )
    base_aa, base_fm = _percent(base, "aa"), _percent(base, "fm")
    if best is base:
        return (
            f"No method beats plain sequential training here (seq: AA {base_aa:.1f} %, FM {base_fm:.1f} points){noise}."
        )
    below = [row.label for row in rows if _percent(row, "aa") < base_aa and not _within_noise(base, row)]
    tail = f"; {_listed(below)} {'is' if len(below) == 1 else 'are'} below seq" if below else ""
    return (
        f"{best.label} has the highest AA: {aa:.1f} % against {base_aa:.1f} % for plain sequential training "
        f"({aa - base_aa:+.1f} points), with FM {fm:.1f} against {base_fm:.1f} points{noise}{tail}."
    )


def _verdict_bits(rows: list[Row]) -> str:
    """Of language: what has the fewest bits, what that costs on the newest tasks, and plain training beside it."""
    base = next((row for row in rows if row.label == "seq"), None)
    best = min((row for row in rows if row is not base), key=lambda row: row.measures["aa"].mean)
    seeds = "" if all(len(row.seeds) > 1 for row in rows) else "; one seed, so differences may be noise"
    forgotten = best.measures["fm"].mean
    said = f"{best.label} has {best.measures['aa'].mean:.3f} {best.measure.title} and forgets {forgotten:.3f}"
    if base is None:
        return f"{said}{seeds}."
    plain = base.measures["fm"].mean
    newest = 100 * (best.measures["newest"].mean / base.measures["newest"].mean - 1)
    share = f" ({100 * forgotten / plain:.0f} % of it)" if plain > 0 else ""
    return (
        f"{said}; plain sequential training has {base.measures['aa'].mean:.3f} and forgets {plain:.3f}{share}. On the "
        f"newest task it takes {newest:+.1f} % bits{seeds}."
    )


def _noise_clause(best: Row, others: list[Row]) -> str:
    """Which rows the data cannot tell from the best one, and by what measure."""
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
    difference = abs(one.measures["aa"].mean - other.measures["aa"].mean)
    return difference <= 2 * math.hypot(one.aa_error, other.aa_error)


def _listed(labels: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def _percent(row: Row, measure: str) -> float:
    return 100 * row.measures[measure].mean
