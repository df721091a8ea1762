"""A comparison as Markdown, CSV, LaTeX, JSON and HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from infssm._files import write_text
from infssm.metrics import Summary
from infssm.runs import page, svg
from infssm.runs.compare import Comparison, Row, compare
from infssm.runs.directory import RunDirectory
from infssm.runs.report import accuracy_map

COLUMNS = {"aa": ("AA", max), "aia": ("AIA", max), "fm": ("FM", min), "til_aa": ("task-inc. AA", max)}
"""Measures of the tables: heading, and which value is the best one."""

_NOTE = (
    "Percent; mean ± sample standard deviation over seeds. AA: average accuracy after the last task, AIA: its mean "
    "over all tasks, FM: forgetting (lower is better), task-inc. AA: decided inside each image's own task."
)


def render(comparison: Comparison, form: str) -> str:
    """The comparison in one of :data:`FORMATS`."""
    return FORMATS[form](comparison)


def write_comparison(runs: Sequence[RunDirectory], folder: Path) -> tuple[Comparison, Path]:
    """Write ``comparison.html``, ``.md``, ``.csv`` and ``.tex`` to ``folder``; return the data and the HTML's path."""
    comparison = compare(runs)
    folder.mkdir(parents=True, exist_ok=True)
    for form in ("html", "md", "csv", "tex"):
        write_text(folder / f"comparison.{form}", render(comparison, form))
    return comparison, folder / "comparison.html"


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table per benchmark, best values in bold."""
    blocks = []
    for benchmark in comparison.benchmarks:
        rows = comparison.of(benchmark)
        cells, best = _cells(rows), best_cells(rows)
        lines = [f"### {benchmark}", "", _pipe(_header()), _pipe(["---", *["---:"] * (len(_header()) - 1)])]
        lines += [
            _pipe([f"**{c}**" if (i, j) in best else c for j, c in enumerate(row)]) for i, row in enumerate(cells)
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _NOTE]) + "\n"


def to_csv(comparison: Comparison) -> str:
    """One line per set-up with mean and standard deviation of every measure, as fractions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures = list(comparison.rows[0].measures)
    writer.writerow(["benchmark", "method", "seeds", *(f"{m}_{part}" for m in measures for part in ("mean", "std"))])
    for row in comparison.rows:
        numbers = [n for m in measures for n in (row.measures[m].mean, row.measures[m].std)]
        shown = ["" if n is None or math.isnan(n) else repr(n) for n in numbers]
        writer.writerow([row.benchmark, row.label, " ".join(map(str, row.seeds)), *shown])
    return text.getvalue()


def to_latex(comparison: Comparison) -> str:
    """A booktabs table per benchmark, best values in bold."""
    blocks = []
    for benchmark in comparison.benchmarks:
        rows = comparison.of(benchmark)
        best = best_cells(rows)
        lines = [f"% {benchmark}", rf"\begin{{tabular}}{{l{'r' * (len(_header()) - 1)}}}", r"\toprule"]
        lines += [" & ".join(_escape(h) for h in _header()) + r" \\", r"\midrule"]
        for i, row in enumerate(_cells(rows)):
            cells = [_escape(c).replace("±", r"$\pm$") for c in row]
            lines.append(" & ".join(rf"\textbf{{{c}}}" if (i, j) in best else c for j, c in enumerate(cells)) + r" \\")
        blocks.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(blocks) + "\n"


def to_json(comparison: Comparison) -> str:
    """All measures and curves as JSON; undefined values are null."""
    rows = [
        {
            "benchmark": row.benchmark,
            "method": row.label,
            "seeds": list(row.seeds),
            "measures": {name: _plain(s) for name, s in row.measures.items()},
            "aa_curve": [v / 100 for v in row.aa_curve],
        }
        for row in comparison.rows
    ]
    return json.dumps({"rows": rows, "verdict": comparison.verdict()}, indent=2) + "\n"


def to_html(comparison: Comparison) -> str:
    """The comparison report: tables, AA curves, forgetting; self-contained."""
    verdict = comparison.verdict()
    parts = [f'<p class="verdict">{escape(verdict)}</p>'] if verdict else []
    for benchmark in comparison.benchmarks:
        rows = comparison.of(benchmark)
        parts.append(page.wide(page.card(benchmark, page.table(_header(), _cells(rows), best_cells(rows)), _NOTE)))
        steps = list(range(len(rows[0].aa_curve)))
        curves = [svg.Series(row.label, steps, row.aa_curve, *row.aa_range) for row in rows]
        cards = [
            page.card(
                "Average accuracy, %",
                svg.line_chart(curves, x_label="after task", y_label="AA, %", x_ticks=steps, y_range=(0, 102)),
                "Bands reach from the lowest to the highest seed." if any(row.aa_range for row in rows) else "",
            )
        ]
        if len(steps) > 1:
            bars = [(row.label, row.forgetting) for row in rows]
            names = [str(t) for t in steps[:-1]]
            cards.append(
                page.card(
                    "Forgetting per task, points",
                    svg.bar_chart(names, bars, x_label="task", y_label="forgetting, points"),
                )
            )
        parts.append(page.columns(cards))
        parts.append(
            page.columns(page.card(f"{row.label}: accuracy after each task, %", _mean_heat(row)) for row in rows)
        )
    runs = sum(len(row.seeds) for row in comparison.rows)
    return page.page("Comparison of methods", f"{runs} runs · {' · '.join(comparison.benchmarks)}", parts)


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "tex": to_latex,
    "html": to_html,
    "json": to_json,
}


def best_cells(rows: Sequence[Row]) -> set[tuple[int, int]]:
    """(row, column) of the best value of every measure, where there is something to choose from."""
    best: set[tuple[int, int]] = set()
    for column, (measure, (_, choose)) in enumerate(COLUMNS.items(), start=2):
        means = [row.measures[measure].mean for row in rows]
        if len(rows) > 1 and not any(math.isnan(m) for m in means):
            best |= {(i, column) for i, m in enumerate(means) if m == choose(means)}
    return best


def _mean_heat(row: Row) -> str:
    return accuracy_map(np.mean([m.class_incremental.values for m in row.matrices], axis=0), row.names_per_task)


def _header() -> list[str]:
    return ["method", "seeds", *(heading for heading, _ in COLUMNS.values())]


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [[row.label, str(len(row.seeds)), *(row.measures[m].format() for m in COLUMNS)] for row in rows]


def _plain(summary: Summary) -> dict[str, float | None]:
    mean = None if math.isnan(summary.mean) else summary.mean
    std = None if summary.std is None or math.isnan(summary.std) else summary.std
    return {"mean": mean, "std": std}


def _pipe(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
