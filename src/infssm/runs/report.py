"""`report.html` of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infssm.errors import InfssmError
from infssm.metrics import AccuracyMatrix, Confusion
from infssm.runs import names, page, svg
from infssm.runs.directory import RunDirectory


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
    confusion = run.confusion()
    classes = confusion.names_per_task if confusion else []
    parts = [
        page.tiles(_headline(matrix, metrics)),
        page.columns(
            [
                page.card(
                    "Accuracy after each task, %",
                    accuracy_map(matrix.class_incremental.values, classes) + page.tasks(classes),
                    "Decided among all classes seen so far.",
                ),
                page.card(
                    "Task-incremental accuracy, %",
                    accuracy_map(matrix.task_incremental.values, classes),
                    "Decided inside the image's own task.",
                ),
                page.card("Average accuracy, %", _curves(matrix)),
                page.card(
                    "Forgetting per task, points", _forgetting(matrix), "From a task's best accuracy to its final one."
                ),
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


def _headline(matrix: AccuracyMatrix, metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    values = matrix.summary()
    tiles = [
        ("AA, %", f"{100 * values['aa']:.2f}"),
        ("AIA, %", f"{100 * values['aia']:.2f}"),
        ("FM, points", "–" if matrix.steps < 2 else f"{100 * values['fm']:.2f}"),
        ("task-incremental AA, %", f"{100 * values['til_aa']:.2f}"),
    ]
    speeds = [line["images_per_s"] for line in metrics if line["kind"] == "epoch"]
    if speeds:
        tiles.append(("images/s in training", f"{sum(speeds) / len(speeds):,.0f}"))
    return tiles


def accuracy_map(values: Any, names: Sequence[Sequence[str]] = ()) -> str:
    """Accuracies ``[steps, tasks]`` as a heat map; ``names`` are the classes of each task, where they are known."""

    def where(i: int, j: int) -> str:
        return f"after task {i}, on task {j}" + (f" ({page.shortened(names[j])})" if j < len(names) else "")

    percent = [[100 * float(v) for v in row] for row in values]
    return svg.heat_map(percent, x_label="accuracy on task", y_label="after task", where=where)


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


def _curves(matrix: AccuracyMatrix) -> str:
    steps = list(range(matrix.steps))
    series = [
        svg.Series("class-incremental", steps, [100 * float(v) for v in matrix.class_incremental.aa_curve]),
        svg.Series("task-incremental", steps, [100 * float(v) for v in matrix.task_incremental.aa_curve]),
    ]
    return svg.line_chart(series, x_label="after task", y_label="AA, %", x_ticks=steps, y_range=(0, 102))


def _forgetting(matrix: AccuracyMatrix) -> str:
    if matrix.steps < 2:
        return "<p>One task only: nothing to forget yet.</p>"
    drops = [100 * float(v) for v in matrix.class_incremental.forgetting_per_task("code")]
    return svg.bar_chart(
        [str(t) for t in range(len(drops))], [("forgetting", drops)], x_label="task", y_label="forgetting, points"
    )


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
