"""What a comparison shows, in sentences computed from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from infssm.bench.reports.row import Row
from infssm.learner.metrics import ACCURACY


def verdict(rows: Sequence[Row]) -> str:
    """What the rows of one benchmark show, in one sentence; empty where there is nothing to compare."""
    if len(rows) < 2 or any(math.isnan(row.measures["fm"].mean) for row in rows):
        return ""
    # Plain sequential training is the yardstick, in its best setting; not where there is nothing else.
    plain = [row for row in rows if row.method == "seq"]
    plain = [] if len(plain) == len(rows) else plain
    if rows[0].measure != ACCURACY:
        return _of_errors(rows, min(plain, key=_aa, default=None))
    best = max(rows, key=lambda row: (_aa(row), row in plain))  # a method that only ties with it does not beat it
    base = max(plain, key=_aa, default=None)
    aa, fm = _percent(best, "aa"), _percent(best, "fm")
    noise = _noise_clause(best, [row for row in rows if row is not best])
    if base is None:
        calmest = min(rows, key=lambda row: row.measures["fm"].mean)
        lowest = _percent(calmest, "fm")
        return (
            f"{best.label} has the highest AA ({aa:.1f} %), {calmest.label} the lowest FM ({lowest:.1f} points){noise}."
        )
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
    """The verdict for bits or RMSE: what has the fewest, what that costs on the newest tasks, and plain training."""
    best = min((row for row in rows if base is None or row.method != "seq"), key=_aa)
    seeds = "" if all(len(row.seeds) > 1 for row in rows) else "; one seed, so differences may be noise"
    forgotten = best.measures["fm"].mean
    reached = f"{best.label} has {best.measures['aa'].mean:.3f} {best.measure.title} and forgets {forgotten:.3f}"
    if base is None:
        return f"{reached}{seeds}."
    plain = base.measures["fm"].mean
    newest = 100 * (best.measures["newest"].mean / base.measures["newest"].mean - 1)
    share = f" ({100 * forgotten / plain:.0f} % of it)" if plain > 0 else ""
    return (
        f"{reached}; plain sequential training has {base.measures['aa'].mean:.3f} and forgets {plain:.3f}{share}. On "
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
    difference = abs(one.measures["aa"].mean - other.measures["aa"].mean)
    return difference <= 2 * math.hypot(one.aa_error, other.aa_error)


def _listed(labels: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def _percent(row: Row, measure: str) -> float:
    return 100 * row.measures[measure].mean


def _aa(row: Row) -> float:
    return row.measures["aa"].mean
