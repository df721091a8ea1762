"""A comparison as Markdown, CSV, LaTeX, JSON and HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from infssm._files import write_text
from infssm.bench.reports.charts import Chart, Series
from infssm.bench.reports.compare import Comparison, compare
from infssm.bench.reports.report import accuracy_map, forgetting_chart, mean_chart, readable
from infssm.bench.reports.rows import Row
from infssm.bench.reports.text import latex_table, markdown, markdown_table, one_line, render
from infssm.learner.metrics import ACCURACY, RMSE, Summary
from infssm.learner.store.directory import RunDirectory, find_runs

Best = Callable[[Sequence[float]], float]


def columns(rows: Sequence[Row]) -> dict[str, tuple[str, Best]]:
    """The measures that the table of one benchmark shows: heading, and which value is the best one."""
    measure = rows[0].measure
    better: Best = max if measure.higher_is_better else min
    aa, aia, fm = ("AA", "AIA", "FM") if measure == ACCURACY else (measure.unit, "all tasks", "forgets")
    shown: dict[str, tuple[str, Best]] = {"aa": (aa, better), "aia": (aia, better), "fm": (fm, min)}
    if measure == ACCURACY and not all("fwt" in row.measures for row in rows):
        if all("online" in row.measures for row in rows):
            return {"aa": shown["aa"], "online": ("along", max)}
        return shown | {"til_aa": ("task-inc. AA", max)}
    shown |= {"newest": ("newest", better), "fwt": ("FWT", max)}
    # Where bytes are the tokens, bits per token are bits per byte.
    if measure.unit == "bits" and any(row.measures["bits_per_token"].mean != row.measures["aa"].mean for row in rows):
        shown["bits_per_token"] = ("per token", min)
    return shown


def note(rows: Sequence[Row]) -> str:
    """The legend of a table."""
    if rows[0].measure == RMSE:
        return (
            "Root mean squared error on test samples (lower is better), mean over the tasks after the last one; all "
            "tasks: its mean over the tasks' ends; forgets: what a task lost since its best; newest: each task after "
            "its own training; FWT: how much better than the mean of its targets a task is just before its own "
            "training. Mean ± sample standard deviation over seeds."
        )
    if rows[0].measure != ACCURACY:
        return (
            f"{rows[0].measure.title.capitalize()} on held-out text (lower is better), mean over the tasks after the "
            "last one; all tasks: its mean over the tasks' ends; forgets: bits that a task lost since its best; "
            "newest: each task after its own training; FWT: bits better than guessing just before its own training; "
            "per token: the same text in bits per token. Mean ± sample standard deviation over seeds."
        )
    if "online" in columns(rows):
        return (
            "Percent; mean ± sample standard deviation over seeds. AA: accuracy on the test samples of all classes "
            "after the stream; along: accuracy on each batch before it was trained on, the area under that curve."
        )
    inside = "task-inc. AA: decided inside each image's own task."
    domains = "newest: each task after its own training, FWT: points better than guessing just before it."
    return (
        "Percent; mean ± sample standard deviation over seeds. AA: average accuracy after the last task, AIA: its mean "
        f"over all tasks, FM: forgetting (lower is better), {domains if 'fwt' in columns(rows) else inside}"
    )


def write_comparison(runs: Iterable[RunDirectory], folder: Path) -> tuple[Comparison, Path]:
    """Write ``comparison.html``, ``.md``, ``.csv`` and ``.tex`` to ``folder``.

    They cover ``runs`` and, after them, all other complete runs in the folder: a command that runs less than an earlier
    one removes nothing from its comparison. Runs that cannot be read are left out and named. Returns the data and the
    HTML's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = {run.path.resolve(): run for run in (*runs, *find_runs([folder]))}
    complete, problems = readable(every.values())
    comparison = compare(complete)
    comparison = replace(comparison, left_out=(*problems, *comparison.left_out))
    for form in ("html", "md", "csv", "tex"):
        write_text(folder / f"comparison.{form}", FORMATS[form](comparison))
    return comparison, folder / "comparison.html"


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table per benchmark, best values in bold."""
    blocks = []
    for benchmark, rows in comparison.benchmarks.items():
        blocks += [f"### {markdown(benchmark)}", markdown_table(_header(rows), _cells(rows), best=best_cells(rows))]
        blocks += map(markdown, comparison.sentences(benchmark))
    notes = dict.fromkeys(map(note, comparison.benchmarks.values()))
    return "\n\n".join([*blocks, *notes, *map(markdown, comparison.left_out)]) + "\n"


def to_csv(comparison: Comparison) -> str:
    """One line per set-up with mean and standard deviation of every measure; accuracies as fractions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures = list(dict.fromkeys(m for row in comparison.rows for m in row.measures))
    writer.writerow(["benchmark", "method", "seeds", *(f"{m}_{part}" for m in measures for part in ("mean", "std"))])
    for row in comparison.rows:
        summaries = [row.measures.get(m) for m in measures]
        numbers = [n for s in summaries for n in ((None, None) if s is None else (s.mean, s.std))]
        shown = ["" if n is None or math.isnan(n) else repr(n) for n in numbers]
        writer.writerow([one_line(row.benchmark), one_line(row.label), " ".join(map(str, row.seeds)), *shown])
    return text.getvalue()


def to_latex(comparison: Comparison) -> str:
    """A booktabs table per benchmark, best values in bold."""
    blocks = []
    for benchmark, rows in comparison.benchmarks.items():
        table = latex_table(_header(rows), _cells(rows), best=best_cells(rows))
        sentences = [f"% {one_line(sentence)}" for sentence in comparison.sentences(benchmark)]
        blocks.append("\n".join([f"% {one_line(benchmark)}", table, *sentences]))
    return "\n\n".join(blocks) + "\n"


def to_json(comparison: Comparison) -> str:
    """All measures and curves as JSON; undefined values are null."""
    rows = [
        {
            "benchmark": row.benchmark,
            "method": row.label,
            "seeds": list(row.seeds),
            "measures": {name: _plain(s) for name, s in row.measures.items()},
            "aa_curve": [v / row.measure.scale for v in row.aa_curve],
        }
        for row in comparison.rows
    ]
    more = {
        "verdict": comparison.verdict(),
        "paired": [test.to_json() for test in comparison.paired],
        "left_out": list(comparison.left_out),
    }
    return json.dumps({"rows": rows} | more, indent=2) + "\n"


def to_html(comparison: Comparison) -> str:
    """The comparison report: tables, AA curves, forgetting; self-contained."""
    parts = [
        {
            "benchmark": benchmark,
            "sentences": comparison.sentences(benchmark),
            "note": note(rows),
            "header": _header(rows),
            "rows": _cells(rows),
            "best": best_cells(rows),
            "charts": charts(rows),
        }
        for benchmark, rows in comparison.benchmarks.items()
    ]
    subtitle = f"{sum(len(row.seeds) for row in comparison.rows)} runs · {' · '.join(comparison.benchmarks)}"
    title = "Comparison of methods"
    return render("comparison.html", title=title, subtitle=subtitle, parts=parts, left_out=comparison.left_out)


def charts(rows: Sequence[Row]) -> list[Chart]:
    """The charts of one benchmark: average over tasks, forgetting, and the matrix of every row."""
    measure, benchmark = rows[0].measure, rows[0].benchmark
    after = [task + 1 for task in range(len(rows[0].aa_curve))]
    curves = [Series(row.label, after, row.aa_curve, *row.aa_range) for row in rows]
    bands = "Bands reach from the lowest to the highest seed." if any(row.aa_range for row in rows) else ""
    title = f"Average {measure.title}, {measure.unit}"
    drawn = [Chart(f"{benchmark} average", title, mean_chart(curves, measure), bands)]
    if len(after) > 1:
        bars = forgetting_chart([(row.label, row.forgetting) for row in rows], measure)
        drawn.append(Chart(f"{benchmark} forgetting", f"Forgetting per task, {measure.change}", bars))
    for row in rows:
        heat = accuracy_map(np.mean([m.all_values for m in row.matrices], axis=0), row.names_per_task, measure)
        title = f"{row.label}: {measure.title} after each task, {measure.unit}"
        drawn.append(Chart(f"{benchmark} matrix {row.label}", title, heat))
    return drawn


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "tex": to_latex,
    "html": to_html,
    "json": to_json,
}


def best_cells(rows: Sequence[Row]) -> set[tuple[int, int]]:
    """(row, column) of the best value of every measure, if there is something to choose from."""
    best: set[tuple[int, int]] = set()
    for column, (measure, (_, choose)) in enumerate(columns(rows).items(), start=2):
        means = [row.measures[measure].mean for row in rows]
        if len(rows) > 1 and not any(math.isnan(m) for m in means):
            best |= {(i, column) for i, m in enumerate(means) if m == choose(means)}
    return best


def _header(rows: Sequence[Row]) -> list[str]:
    return ["method", "seeds", *(heading for heading, _ in columns(rows).values())]


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    scale, digits = rows[0].measure.scale, rows[0].measure.digits
    shown = [[row.measures[m].format(scale=scale, digits=digits) for m in columns(rows)] for row in rows]
    return [[row.label, str(len(row.seeds)), *cells] for row, cells in zip(rows, shown, strict=True)]


def _plain(summary: Summary) -> dict[str, float | None]:
    values = {"mean": summary.mean, "std": summary.std}
    return {name: None if value is None or math.isnan(value) else value for name, value in values.items()}
