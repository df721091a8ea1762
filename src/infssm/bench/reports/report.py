"""`report.html` of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infssm.bench.reports.charts import Bars, Chart, HeatMap, Lines, Series
from infssm.bench.reports.metrics import headline
from infssm.bench.reports.text import render
from infssm.data.files import shown
from infssm.errors import InfssmError
from infssm.learner.metrics import ACCURACY, Quantity
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory


def readable(runs: Iterable[RunDirectory]) -> tuple[list[RunDirectory], list[str]]:
    """Complete runs whose files can be read, and the reasons why others are left out."""
    complete, problems, unfinished = [], [], []
    for run in runs:
        if not run.complete:
            unfinished.append(run)
            continue
        try:
            RunDirectory.open(run.path)
            for read in (run.config, run.matrix, run.names_per_task):
                read()
            complete.append(run)
        except InfssmError as error:
            problems.append(f"left out {run.path}: {error}")
    if unfinished:
        first = unfinished[0].path
        problems.append(f"left out {len(unfinished)} unfinished; continue the first with `infssm resume {first}`")
    return complete, problems


def write_reports(runs: Iterable[RunDirectory]) -> tuple[list[RunDirectory], list[str]]:
    """Write ``report.html`` of every complete run that can be read; returns what :func:`readable` does."""
    complete, problems = readable(runs)
    for run in complete:
        try:
            write_report(run)
        # Its curves are damaged or the folder is read-only: its results still count, and the others have their reports.
        except InfssmError as error:  # noqa: PERF203
            problems.append(f"no report.html for {run.path}: {error}")
    return complete, problems


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` for a run, complete or under way, and return its path."""
    run.write_text(run.report_path.name, render_report(run))
    return run.report_path


def render_report(run: RunDirectory) -> str:
    """The report as one self-contained HTML document."""
    config, matrix = run.config(), run.matrix()
    env = run.env() if (run.path / layout.ENV).exists() else {}
    state = "" if run.complete else f" · {matrix.steps} of {matrix.num_tasks} tasks so far"
    if config["data"].get("evaluate") == "val":
        state += " · on validation data"
    subtitle = (
        f"{config['data']['name']}, {matrix.num_tasks} tasks · {config['model']['name']} · seed {config['seed']}{state}"
    )
    confusion = run.confusion()
    per_class = () if confusion is None else zip(confusion.classes, (100 * confusion.per_class).tolist(), strict=True)
    return render(
        "run.html",
        title=config["method"]["name"],
        subtitle=subtitle,
        tiles=headline(matrix, run.metrics()),
        charts=charts(run),
        classes=list(per_class),
        config=config,
        env=env,
    )


def charts(run: RunDirectory) -> list[Chart]:
    """All charts of a run."""
    matrix, metrics, classes = run.matrix(), run.metrics(), run.names_per_task()
    measure, domains = matrix.quantity, matrix.of_domains
    decided = "Domains to come are tested too." if domains else "Decided among all classes seen so far."
    heat = accuracy_map(matrix.all_values, classes, measure)
    drawn = [Chart("matrix", f"{measure.title.capitalize()} after each task, {measure.unit}", heat, decided, classes)]
    if domains:
        curves = {"tasks seen so far": matrix.aa_curve}
    else:
        curves = {
            "class-incremental": matrix.class_incremental.aa_curve,
            "task-incremental": matrix.task_incremental.aa_curve,
        }
        inside = accuracy_map(matrix.task_incremental.values, classes)
        note = "Decided inside the image's own task."
        drawn.append(Chart("matrix inside tasks", "Task-incremental accuracy, %", inside, note))
    after = [task + 1 for task in range(matrix.steps)]
    series = [Series(name, after, (measure.scale * np.asarray(curve)).tolist()) for name, curve in curves.items()]
    drawn.append(Chart("average", f"Average {measure.title}, {measure.unit}", mean_chart(series, measure)))
    drawing: Lines | Bars | str = "One task only: nothing to forget yet."
    if matrix.steps > 1:
        drops = (measure.scale * matrix.class_incremental.forgetting_per_task("code")).tolist()
        drawing = forgetting_chart([("forgetting", drops)], measure)
    lost = f"From a task's best {measure.title} to its final one."
    drawn.append(Chart("forgetting", f"Forgetting per task, {measure.change}", drawing, lost))
    epochs = [line for line in metrics if line["kind"] == "epoch"]
    drawing = "No epoch was trained."
    if terms := list(dict.fromkeys(name for line in epochs for name in line["loss"])):
        points = {name: [(i, e["loss"][name]) for i, e in enumerate(epochs, 1) if name in e["loss"]] for name in terms}
        series = [Series(name, *zip(*pairs, strict=True)) for name, pairs in points.items()]
        drawing = Lines(series, "epoch of the run", "loss", log=True, markers=len(epochs) <= 60)
    drawn.append(Chart("losses", "Loss terms", drawing, "Mean per epoch, weights applied, logarithmic scale."))
    drawing = "No step was trained."
    if steps := [line for line in metrics if line["kind"] == "step"]:
        rates = Series("learning rate", [line["at"] for line in steps], [line["lr"] for line in steps])
        drawing = Lines([rates], "step of the run", "learning rate", log=True, markers=False)
    drawn.append(Chart("learning rate", "Learning rate", drawing))
    if (confusion := run.confusion()) is not None:
        totals, names = confusion.counts.sum(1, keepdims=True), confusion.classes
        shares = np.where(totals > 0, 100 * confusion.counts / np.maximum(totals, 1), np.nan)
        taken = HeatMap(
            shares.tolist(),
            "predicted",
            "true",
            where=lambda i, j: f"{names[i]} taken for {names[j]}",
            names=names if len(names) <= 20 else (),
        )
        note = "Share of each class's images, after the last task. Point at a cell for its classes."
        drawn.append(Chart("confusion", "What is taken for what, %", taken, note))
    return drawn


def mean_chart(series: Sequence[Series], measure: Quantity) -> Lines:
    """Means over the tasks seen, after each task, as shown."""
    accuracy = measure == ACCURACY
    top = 102.0 if accuracy else 1.05 * max((v for one in series for v in one.y), default=1.0)
    ticks = series[0].x
    return Lines(series, "after task", "AA, %" if accuracy else measure.title, x_ticks=ticks, y_range=(0, top))


def forgetting_chart(groups: Sequence[tuple[str, Sequence[float]]], measure: Quantity) -> Bars:
    """Forgetting of each task but the last, as shown."""
    labels = [str(task + 1) for task in range(len(groups[0][1]))]
    return Bars(labels, groups, "task", f"forgetting, {measure.change}")


def accuracy_map(values: Any, names: Sequence[Sequence[str]] = (), measure: Quantity = ACCURACY) -> HeatMap:
    """Accuracies ``[steps, tasks]`` as a heat map; ``names`` are the classes of each task, if they are known."""

    def where(i: int, j: int) -> str:
        return f"after task {i + 1}, on task {j + 1}" + (f" ({shown(names[j], 6)})" if j < len(names) else "")

    scaled = [[measure.scale * float(v) for v in row] for row in values]
    top = 100.0 if measure == ACCURACY else max((v for row in scaled for v in row if v == v), default=1.0)
    return HeatMap(scaled, f"{measure.title} on task", "after task", where, top=top, unit=measure.unit)
