"""`report.html` of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infssm.bench.reports import page, svg
from infssm.errors import InfssmError
from infssm.learner.metrics import ACCURACY, BITS_PER_TOKEN, AccuracyMatrix, Confusion, Measure
from infssm.learner.store import names
from infssm.learner.store.directory import RunDirectory


def write_reports(runs: Iterable[RunDirectory]) -> tuple[list[RunDirectory], list[str]]:
    """Write ``report.html`` of every complete run that can be read.

    Returns those runs, and in words why others are left out.
    """
    readable, problems, unfinished = [], [], []
    for run in runs:
        if not run.complete:
            unfinished.append(run)
            continue
        try:
            text = render_report(RunDirectory.open(run.path))
        except InfssmError as error:
            problems.append(f"left out {run.path}: {error}")
            continue
        readable.append(run)
        try:
            run.write_text(run.report_path.name, text)
        except InfssmError as error:
            problems.append(str(error))
    if unfinished:
        first = unfinished[0].path
        problems.append(f"left out {len(unfinished)} unfinished; continue the first with `infssm resume {first}`")
    return readable, problems


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` for a run, complete or under way, and return its path."""
    run.write_text(run.report_path.name, render_report(run))
    return run.report_path


def render_report(run: RunDirectory) -> str:
    """The report as one self-contained HTML document."""
    config, matrix, metrics = run.config(), run.matrix(), run.metrics()
    env = run.env() if (run.path / names.ENV).exists() else {}
    method, model = config["method"]["name"], config["model"]["name"]
    state = "" if run.complete else f" · {matrix.steps} of {matrix.num_tasks} tasks so far"
    if config["data"].get("evaluate") == "val":
        state += " · on validation images"
    confusion, classes, measure = run.confusion(), run.names_per_task(), matrix.measure
    lost = f"From a task's best {measure.title} to its final one."
    parts = [
        page.tiles(_headline(matrix, metrics)),
        page.columns(
            [
                *_matrices(matrix, classes),
                page.card(f"Average {measure.title}, {measure.unit}", _curves(matrix)),
                page.card(f"Forgetting per task, {measure.change}", _forgetting(matrix), lost),
                page.card("Loss terms", _losses(metrics), "Mean per epoch, weights applied, logarithmic scale."),
                page.card("Learning rate", _rates(metrics)),
            ]
        ),
        "" if confusion is None else page.columns(_classes(confusion)),
        page.settings("Configuration", config),
        page.settings("Environment", env),
    ]
    subtitle = f"{config['data']['name']}, {matrix.num_tasks} tasks · {model} · seed {config['seed']}{state}"
    return page.page(f"{method}", subtitle, parts)


def _matrices(matrix: AccuracyMatrix, classes: Sequence[Sequence[str]]) -> list[str]:
    """What every task is at after every task."""
    measure, domains = matrix.measure, matrix.of_domains
    first = page.card(
        f"{measure.title.capitalize()} after each task, {measure.unit}",
        accuracy_map(matrix.all_values, classes, measure) + page.tasks(classes),
        "Domains to come are tested too." if domains else "Decided among all classes seen so far.",
    )
    if domains:
        return [first]
    inside = page.card(
        "Task-incremental accuracy, %",
        accuracy_map(matrix.task_incremental.values, classes),
        "Decided inside the image's own task.",
    )
    return [first, inside]


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


def _classes(confusion: Confusion) -> list[str]:
    """What each class is taken for, and how often it is right."""
    totals = confusion.counts.sum(1, keepdims=True)
    share = 100 * confusion.counts / np.maximum(totals, 1)
    names = confusion.classes
    chart = svg.heat_map(
        np.where(totals > 0, share, np.nan).tolist(),
        x_label="predicted",
        y_label="true",
        where=lambda i, j: f"{names[i]} taken for {names[j]}",
        names=names if len(names) <= 20 else None,
    )
    note = "Share of each class's images, after the last task. Point at a cell for its classes."
    bars = page.bars(list(zip(names, (100 * confusion.per_class).tolist(), strict=True)))
    return [page.card("What is taken for what, %", chart, note), page.card("Accuracy on each class, %", bars)]


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
