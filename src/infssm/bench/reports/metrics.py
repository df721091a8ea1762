"""Which metrics are shown, and what they are called: columns and legend of a comparison, tiles of a run's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from infssm.bench.reports.rows import Row
from infssm.learner.metrics import ACCURACY, BITS_PER_TOKEN, RMSE, AccuracyMatrix

Best = Callable[[Sequence[float]], float]
_SPREAD = "mean ± sample standard deviation over seeds."


def columns(rows: Sequence[Row]) -> dict[str, tuple[str, Best]]:
    """The metrics that the table of one benchmark shows: heading, and which value is the best one."""
    measure = rows[0].measure
    better: Best = max if measure.higher_is_better else min
    aa, aia, fm = ("AA", "AIA", "FM") if measure == ACCURACY else (measure.unit, "all tasks", "forgets")
    shown: dict[str, tuple[str, Best]] = {"aa": (aa, better), "aia": (aia, better), "fm": (fm, min)}
    if measure == ACCURACY and not all("fwt" in row.metrics for row in rows):
        if all("online" in row.metrics for row in rows):
            return {"aa": shown["aa"], "online": ("along", max)}
        return shown | {"til_aa": ("task-inc. AA", max)}
    shown |= {"newest": ("newest", better), "fwt": ("FWT", max)}
    # Where bytes are the tokens, bits per token are bits per byte.
    if measure.unit == "bits" and any(row.metrics["bits_per_token"].mean != row.metrics["aa"].mean for row in rows):
        shown["bits_per_token"] = ("per token", min)
    return shown


def legend(rows: Sequence[Row]) -> str:
    """What the columns of a table mean."""
    measure, shown = rows[0].measure, columns(rows)
    if measure == ACCURACY:
        if "online" in shown:
            return (
                f"Percent; {_SPREAD} AA: accuracy on the test samples of all classes after the stream; along: "
                "accuracy on each batch before it was trained on, the area under that curve."
            )
        others = "task-inc. AA: decided inside each image's own task."
        if "fwt" in shown:
            others = "newest: each task after its own training, FWT: points better than guessing just before it."
        return (
            f"Percent; {_SPREAD} AA: average accuracy after the last task, AIA: its mean over all tasks, FM: "
            f"forgetting (lower is better), {others}"
        )
    what, lost = "Root mean squared error on test samples", "what a task lost since its best"
    ahead = "how much better than the mean of its targets a task is just before its own training"
    if measure != RMSE:
        what, lost = f"{measure.title.capitalize()} on held-out text", "bits that a task lost since its best"
        ahead = "bits better than guessing just before its own training; per token: the same text in bits per token"
    return (
        f"{what} (lower is better), mean over the tasks after the last one; all tasks: its mean over the tasks' ends; "
        f"forgets: {lost}; newest: each task after its own training; FWT: {ahead}. {_SPREAD.capitalize()}"
    )


def headline(matrix: AccuracyMatrix, log: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Titles and values of the tiles of a run's report; ``log`` holds the lines of its log."""
    values, measure = matrix.summary(), matrix.quantity
    tiles = {measure.title: "aa"}
    if measure == ACCURACY:
        tiles = {"AA, %": "aa", "AIA, %": "aia", "FM, points": "fm"}
    elif measure == RMSE:
        tiles |= {"forgetting, RMSE": "fm"}
    else:
        tiles |= {
            BITS_PER_TOKEN.title: "bits_per_token",
            "perplexity per token": "perplexity",
            "forgetting, bits": "fm",
        }
    if "online" in values:
        tiles = {next(iter(tiles)): "aa", "along the stream, %": "online"}
    elif matrix.of_domains:
        tiles |= {f"newest task, {measure.unit}": "newest", f"backward transfer, {measure.change}": "bwt"}
        tiles |= {f"forward transfer, {measure.change}": "fwt"}
    else:
        tiles |= {"task-incremental AA, %": "til_aa"}
    texts = {name: measure.show(value) for name, value in values.items()}
    if not math.isnan(per_token := values.get("bits_per_token", math.nan)):
        texts["perplexity"] = f"{2**per_token:.2f}"
    shown = [(title, texts.get(name, "–")) for title, name in tiles.items()]
    if speeds := [line["images_per_s"] for line in log if line["kind"] == "epoch"]:
        kind = "samples" if matrix.of_domains else "images"
        shown.append((f"{kind}/s in training", f"{sum(speeds) / len(speeds):,.0f}"))
    return shown
