"""`report.html` of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infssm.bench.reports import page, svg
from infssm.bench.reports.figures import Chart
from infssm.errors import InfssmError
from infssm.learner.metrics import ACCURACY, BITS_PER_TOKEN, AccuracyMatrix, Confusion, Measure
from infssm.learner.store import names
from infssm.learner.store.directory import RunDirectory


def readable(runs: Iterable[RunDirectory]) -> tuple[list[RunDirectory], list[str]]:
    """Complete runs whose files can be read, and in words why others are left out."""
    found, problems, unfinished = [], [], []
    for run in runs:
        if not run.complete:
            unfinished.append(run)
            continue
        try:
            RunDirectory.open(run.path)
            for read in (run.config, run.matrix, run.names_per_task):
                read()
            found.append(run)
        except InfssmError as error:
            problems.append(f"left out {run.path}: {error}")
    if unfinished:
        first = unfinished[0].path
        problems.append(f"left out {len(unfinished)} unfinished; continue the first with `infssm resume {first}`")
    return found, problems


def write_reports(runs: Iterable[RunDirectory]) -> tuple[list[RunDirectory], list[str]]:
    """Write ``report.html`` of every complete run that can be read; returns what :func:`readable` does."""
    found, problems = readable(runs)
    for run in found:
        try:
            write_report(run)
        # Its curves are damaged or the folder is read-only: its results still count, and the others have their reports.
        except InfssmError as error:  # noqa: PERF203
            problems.append(f"no report.html for {run.path}: {error}")
    return found, problems


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` for a run, complete or under way, and return its path."""
    run.write_text(run.report_path.name, render_report(run))
    return run.report_path


def render_report(run: RunDirectory) -> str:
    """The report as one self-contained HTML document."""
    config, matrix = run.config(), run.matrix()
    env = run.env() if (run.path / names.ENV).exists() else {}
    state = "" if run.complete else f" · {matrix.steps} of {matrix.num_tasks} tasks so far"
    if config["data"].get("evaluate") == "val":
        state += " · on validation data"
    subtitle = (
        f"{config['data']['name']}, {matrix.num_tasks} tasks · {config['model']['name']} · seed {config['seed']}{state}"
    )
    cards = [page.card(chart.title, chart.drawing, chart.note) for chart in charts(run)]
    confusion = run.confusion()
    if confusion is not None:
        accuracies = zip(confusion.classes, (100 * confusion.per_class).tolist(), strict=True)
        cards.append(page.card("Accuracy on each class, %", page.bars(list(accuracies))))
    parts = [
        page.tiles(_headline(matrix, run.metrics())),
        page.columns(cards),
        page.settings("Configuration", config),
        page.settings("Environment", env),
    ]
    return page.page(config["method"]["name"], subtitle, parts)


def charts(run: RunDirectory) -> list[Chart]:
    """All charts of a run."""
    matrix, metrics, classes = run.matrix(), run.metrics(), run.names_per_task()
    measure, domains = matrix.measure, matrix.of_domains
    heat = accuracy_map(matrix.all_values, classes, measure) + page.tasks(classes)
    decided = "Domains to come are tested too." if domains else "Decided among all classes seen so far."
    found = [Chart("matrix", f"{measure.title.capitalize()} after each task, {measure.unit}", heat, decided)]
    if not domains:
        inside = accuracy_map(matrix.task_incremental.values, classes)
        note = "Decided inside the image's own task."
        found.append(Chart("matrix inside tasks", "Task-incremental accuracy, %", inside, note))
    lost = f"From a task's best {measure.title} to its final one."
    losses = "Mean per epoch, weights applied, logarithmic scale."
    found += [
        Chart("average", f"Average {measure.title}, {measure.unit}", _curves(matrix)),
        Chart("forgetting", f"Forgetting per task, {measure.change}", _forgetting(matrix), lost),
        Chart("losses", "Loss terms", _losses(metrics), losses),
        Chart("learning rate", "Learning rate", _rates(metrics)),
    ]
    confusion = run.confusion()
    if confusion is not None:
        note = "Share of each class's images, after the last task. Point at a cell for its classes."
        found.append(Chart("confusion", "What is taken for what, %", _confusion(confusion), note))
    return found


def _headline(matrix: AccuracyMatrix, metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    values, measure = matrix.summary(), matrix.measure
    if measure == ACCURACY:
        tiles = [("AA, %", measure.show(values["aa"])), ("AIA, %", measure.show(values["aia"]))]
        tiles.append(("FM, points", measure.show(values["fm"])))
    else:
        per_token = values["bits_per_token"]
        tiles = [(measure.title, measure.show(values["aa"]))]
        if measure != BITS_PER_TOKEN:
            tiles.append((BITS_PER_TOKEN.title, measure.show(per_token)))
        tiles.append(("perplexity per token", "–" if math.isnan(per_token) else f"{2**per_token:.2f}"))
        tiles.append(("forgetting, bits", measure.show(values["fm"])))
    if matrix.of_domains:
        tiles.append((f"newest task, {measure.unit}", measure.show(values["newest"])))
        tiles.append((f"backward transfer, {measure.change}", measure.show(values["bwt"])))
        tiles.append((f"forward transfer, {measure.change}", measure.show(values["fwt"])))
    else:
        tiles.append(("task-incremental AA, %", measure.show(values["til_aa"])))
    speeds = [line["images_per_s"] for line in metrics if line["kind"] == "epoch"]
    if speeds:
        tiles.append(
            (f"{'samples' if matrix.of_domains else 'images'}/s in training", f"{sum(speeds) / len(speeds):,.0f}")
        )
    return tiles


def accuracy_map(values: Any, names: Sequence[Sequence[str]] = (), measure: Measure = ACCURACY) -> str:
    """Accuracies ``[steps, tasks]`` as a heat map; ``names`` are the classes of each task, where they are known."""

    def where(i: int, j: int) -> str:
        return f"after task {i}, on task {j}" + (f" ({page.shortened(names[j])})" if j < len(names) else "")

    shown = [[measure.scale * float(v) for v in row] for row in values]
    top = 100.0 if measure == ACCURACY else max((v for row in shown for v in row if v == v), default=1.0)
    label = f"{measure.title} on task"
    return svg.heat_map(shown, x_label=label, y_label="after task", where=where, top=top, unit=measure.unit)


def _confusion(confusion: Confusion) -> str:
    """What each class is taken for, as shares of its images."""
    totals = confusion.counts.sum(1, keepdims=True)
    share = 100 * confusion.counts / np.maximum(totals, 1)
    names = confusion.classes
    return svg.heat_map(
        np.where(totals > 0, share, np.nan).tolist(),
        x_label="predicted",
        y_label="true",
        where=lambda i, j: f"{names[i]} taken for {names[j]}",
        names=names if len(names) <= 20 else None,
    )


def mean_chart(series: Sequence[svg.Series], measure: Measure, steps: Sequence[int]) -> str:
    """Means over the tasks seen, after each task, as shown."""
    if measure == ACCURACY:
        return svg.line_chart(series, x_label="after task", y_label="AA, %", x_ticks=steps, y_range=(0, 102))
    top = 1.05 * max((v for one in series for v in one.y), default=1.0)
    return svg.line_chart(series, x_label="after task", y_label=measure.title, x_ticks=steps, y_range=(0, top))


def _curves(matrix: AccuracyMatrix) -> str:
    steps = list(range(matrix.steps))
    if matrix.of_domains:
        curve = [matrix.measure.scale * float(v) for v in matrix.aa_curve]
        return mean_chart([svg.Series("tasks seen so far", steps, curve)], matrix.measure, steps)
    series = [
        svg.Series("class-incremental", steps, [100 * float(v) for v in matrix.class_incremental.aa_curve]),
        svg.Series("task-incremental", steps, [100 * float(v) for v in matrix.task_incremental.aa_curve]),
    ]
    return mean_chart(series, ACCURACY, steps)


def _forgetting(matrix: AccuracyMatrix) -> str:
    if matrix.steps < 2:
        return "<p>One task only: nothing to forget yet.</p>"
    drops = [matrix.measure.scale * float(v) for v in matrix.class_incremental.forgetting_per_task("code")]
    label = f"forgetting, {matrix.measure.change}"
    return svg.bar_chart([str(t) for t in range(len(drops))], [("forgetting", drops)], x_label="task", y_label=label)


def _losses(metrics: Sequence[dict[str, Any]]) -> str:
    epochs = [line for line in metrics if line["kind"] == "epoch"]
    names = list(dict.fromkeys(name for line in epochs for name in line["loss"]))
    if not names:
        return "<p>No epoch was trained.</p>"
    series = []
    for name in names:
        points = [(i, line["loss"][name]) for i, line in enumerate(epochs) if name in line["loss"]]
        series.append(svg.Series(name, [i for i, _ in points], [v for _, v in points]))
    return svg.line_chart(series, x_label="epoch of the run", y_label="loss", log=True, markers=len(epochs) <= 60)


def _rates(metrics: Sequence[dict[str, Any]]) -> str:
    steps = [line for line in metrics if line["kind"] == "step"]
    if not steps:
        return "<p>No step was trained.</p>"
    series = svg.Series("learning rate", [line["at"] for line in steps], [line["lr"] for line in steps])
    return svg.line_chart([series], x_label="step of the run", y_label="learning rate", log=True, markers=False)
