"""The tables and the picture of docs/results/sequences.md, from what benchmarks.sequences stored."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import RESULTS, markdown_table, spread, write_table


class Point(NamedTuple):
    """What a run ended with, all as the measure has them."""

    mean: float
    """Over all tasks, on test samples."""
    forgetting: float
    newest: float
    """The value on the newest task."""
    validation: list[float]
    """The last model's value on validation samples of each task: what settings are chosen by."""
    seconds: float

    @property
    def chosen_by(self) -> float:
        """Mean over all tasks on validation samples."""
        return statistics.mean(self.validation)

    @property
    def newest_validation(self) -> float:
        """On validation samples of the newest task."""
        return self.validation[-1]

    @property
    def old_validation(self) -> float:
        """Mean over the other tasks."""
        return statistics.mean(self.validation[:-1])


class Row(NamedTuple):
    """A setting: its name, its family, its runs by seed."""

    label: str
    family: str
    points: dict[str, Point]

    def average(self, key: str) -> float:
        """Mean over seeds."""
        return statistics.mean(getattr(point, key) for point in self.points.values())


def rows_of(stream: Mapping[str, Any]) -> list[Row]:
    """The settings of a stored stream; the first is plain training."""
    return [
        Row(label, found["family"], {seed: Point(*point) for seed, point in found["points"].items()})
        for label, found in stream["arms"].items()
    ]


def chosen(rows: Sequence[Row], *, bits: bool) -> set[str]:
    """The setting of each family that is best on validation samples."""
    best: dict[str, Row] = {}
    sign = 1 if bits else -1
    for row in rows:
        other = best.get(row.family)
        if other is None or sign * row.average("chosen_by") < sign * other.average("chosen_by"):
            best[row.family] = row
    return {row.label for row in best.values()}


def recommended(rows: Sequence[Row]) -> Row:
    """The setting without old text that has the old domains best, the newest at most 1 % worse than plain training.

    All on validation text. All settings start from one model, so the best old domains are the least forgetting.
    """
    bound = 1.01 * rows[0].average("newest_validation")
    free = [row for row in rows if row.family != "er" and row.average("newest_validation") <= bound]
    return min(free, key=lambda row: row.average("old_validation"))


def table(rows: Sequence[Row], *, bits: bool) -> list[str]:
    """A line per setting; what was chosen in bold; for language beside plain training."""
    head = ["all domains, mean", "forgetting", "newest"] if bits else ["AA, %", "FM, points", "newest task, %"]
    more = ["forgetting of plain", "newest, of plain"] if bits else []
    cells_of, bold = [], chosen(rows, bits=bits)
    for row in rows:
        cells = [_spread(row, key, bits=bits) for key in ("mean", "forgetting", "newest")]
        if bits:
            pairs = [(point, rows[0].points[seed]) for seed, point in row.points.items() if seed in rows[0].points]
            lost = statistics.mean(100 * p.forgetting / q.forgetting for p, q in pairs)
            new = statistics.mean(100 * (p.newest / q.newest - 1) for p, q in pairs)
            cells += [f"{lost:.0f} %", f"{new:+.1f} %"]
        name = f"**{row.label}**" if row.label in bold else row.label
        cells_of.append([name, *cells, str(len(row.points))])
    lines = markdown_table(["arm", *head, *more, "seeds"], cells_of)
    if bits:
        rule = f"the newest domain at most 1 % worse than with {rows[0].label}, without old text"
        lines += ["", f"Least forgetting on validation text, {rule}: **{recommended(rows).label}**."]
    return lines


def _spread(row: Row, key: str, *, bits: bool) -> str:
    values = [getattr(point, key) for point in row.points.values()]
    return spread(values, 3) if bits else spread(values, 1, scale=100.0)


def picture(stored: Mapping[str, Any], path: Path) -> None:
    """Forgetting against the newest task, a panel per stream, a line per family; plain training is the dashed curve."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    wide = 2
    high = -(-len(stored) // wide)
    figure, panels = pyplot.subplots(high, wide, figsize=(13, 4.8 * high), squeeze=False)
    for axes in panels.flat[len(stored) :]:
        axes.set_visible(False)
    for axes, (name, stream) in zip(panels.flat, stored.items(), strict=False):
        _panel(axes, rows_of(stream), bits=stream["bits"])
        axes.set_title(name, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panel(axes: Any, rows: Sequence[Row], *, bits: bool) -> None:
    scale, bold = 1 if bits else 100, chosen(rows, bits=bits)
    colors = {family: f"C{number % 10}" for number, family in enumerate(dict.fromkeys(row.family for row in rows[1:]))}
    for family, group in groupby(rows, key=lambda row: row.family):  # the weights at one rate, one after the other
        own = list(group)
        if family == "plain":
            own.sort(key=lambda row: row.average("forgetting"))
        x, y = ([scale * row.average(key) for row in own] for key in ("newest", "forgetting"))
        style = {"linestyle": "--", "color": "black"} if family == "plain" else {"color": colors[family]}
        known = family in axes.get_legend_handles_labels()[1]
        axes.plot(x, y, marker="o", markersize=4, label=None if known else family, **style)
        for row, a, b in zip(own, x, y, strict=True):
            if family == "plain" or row.label in bold:
                axes.annotate(row.label, (a, b), fontsize=6, xytext=(4, 3), textcoords="offset points")
    unit = "bits per byte" if bits else "%"
    axes.set_xlabel(f"newest task, {unit} ({'left' if bits else 'right'} is better)", fontsize=8)
    axes.set_ylabel(f"forgetting, {unit if bits else 'points'} (down is better)", fontsize=8)
    axes.legend(fontsize=6)


def summary(stored: Mapping[str, Any]) -> list[str]:
    """One line per stream: plain training, the best arm without old data, by validation samples, and replay."""
    lines = ["| stream | plain training | best without old data | | replay |", "|---|---:|---:|---|---:|"]
    for name, stream in stored.items():
        bits, rows = stream["bits"], rows_of(stream)
        bold = [row for row in rows if row.label in chosen(rows, bits=bits)]
        free = [row for row in bold if row.family not in ("er", "joint", "plain")]
        best = (min if bits else max)(free, key=lambda row: row.average("chosen_by"))
        replay = next((row for row in bold if row.family == "er"), None)
        cells = ["not run" if row is None else _spread(row, "mean", bits=bits) for row in (rows[0], best, replay)]
        unit = "bits per byte" if bits else "AA, %"
        lines.append(f"| {TITLES[name]} ({unit}) | {cells[0]} | {cells[1]} | `{best.label}` | {cells[2]} |")
    return lines


TITLES = {
    "stdlib-text": "Python's documentation, then its source",
    "manuals": "manual pages in English, German, French",
    "four domains": "four kinds of Python's text",
    "six languages": "manual pages in six languages",
    "larger model": "three languages, 5.4 million parameters, BPE tokens",
    "digits, mamba_nano": "two new spoken digits at a time, Mamba",
    "speakers, mamba_nano": "six speakers in turn, Mamba",
    "digits, s4d_nano": "two new spoken digits at a time, S4D",
    "speakers, s4d_nano": "six speakers in turn, S4D",
    "pixels, s4d_base": "CIFAR-100 pixel by pixel, public S4D weights",
}


def write_page(stored: Mapping[str, Any]) -> None:
    """Rewrite the tables between the page's markers, and the picture; the text around them is kept."""
    page = RESULTS / "sequences.md"
    measured = {name: stream for name, stream in stored.items() if name != "machine"}
    for name, stream in measured.items():
        write_table(page, table(rows_of(stream), bits=stream["bits"]), name)
    write_table(page, summary(measured), "summary")
    picture(measured, RESULTS / "sequences.png")
