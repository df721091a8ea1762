"""The charts of a report as files: PNG, SVG and PDF, drawn with matplotlib in the colours of the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infssm._files import explained
from infssm.bench.reports.charts import Bars, Chart, HeatMap, Lines
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_FORMATS = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""With the metadata that would make two files of one chart differ."""
_MARKERS = ("o", "s", "D", "^")
_DASHES: tuple[Any, ...] = ("-", (0, (3.5, 2)), (0, (1, 1.5)), (0, (4.5, 1.5, 1, 1.5)))
"""Dash patterns as in report.css, in units of the line width."""
_STYLE: Any = {
    "font.size": 8.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # names may have dollars
    "pdf.fonttype": 42,  # TrueType: many publishers refuse matplotlib's Type 3
    "svg.hashsalt": "infssm",  # the same chart is the same file
}


def write_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as PNG, SVG and PDF to ``folder`` and return the paths."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures are written with matplotlib: pip install 'infssm[bench]'") from None
    written = []
    with explained(folder), rc_context(_STYLE):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            if isinstance(chart.drawing, str):
                continue
            figure = Figure(figsize=(5.6, 3.2), layout="constrained")  # fits the column of an article
            panel = figure.add_subplot(xlabel=chart.drawing.x_label, ylabel=chart.drawing.y_label)
            names = _DRAW[type(chart.drawing)](panel, chart.drawing)
            if names > 1:
                figure.legend(loc="outside lower center", ncols=min(names, 3))
            stem = re.sub(r"[^\w.+=-]+", "-", chart.name).strip("-.")[:100]
            for form, metadata in FIGURE_FORMATS.items():
                written.append(folder / f"{stem}.{form}")
                figure.savefig(written[-1], dpi=300, metadata=metadata)
    return written


@cache
def _colours() -> dict[str, str]:
    """The colours of the light page, by name."""
    style = (files("infssm.bench.reports") / "templates" / "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+)", style.partition("}")[0]))


def _lines(panel: Axes, chart: Lines) -> int:
    for number, series in enumerate(line.drawable(log=chart.log) for line in chart.series):
        colour = _colours()[f"c{number % 8}"]
        style = {"color": colour, "linestyle": _DASHES[number % 4], "label": series.name}
        panel.plot(series.x, series.y, marker=_MARKERS[number % 4] if chart.markers else "", markersize=5, **style)
        if series.low is not None and series.high is not None:
            panel.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
    panel.grid(axis="y", color=_colours()["line"])
    if chart.log:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:.0e}")  # its own labels are mathematics
    if chart.y_range is not None:
        panel.set_ylim(chart.y_range)
    if chart.x_ticks:
        panel.set_xticks(chart.x_ticks)
    return len(chart.series)


def _bars(panel: Axes, chart: Bars) -> int:
    width, places = 0.7 / len(chart.groups), np.arange(len(chart.labels))
    for number, (name, heights) in enumerate(chart.groups):
        left = places - 0.35 + number * width
        panel.bar(left, heights, 0.92 * width, align="edge", color=_colours()[f"c{number % 8}"], label=name)
    panel.axhline(0, color=_colours()["soft"], linewidth=0.8)
    panel.set_xticks(places, chart.labels)
    return len(chart.groups)


def _heat_map(panel: Axes, chart: HeatMap) -> int:
    from matplotlib.colors import LinearSegmentedColormap

    columns = chart.columns
    values = np.full((len(chart.values), columns), np.nan)
    for row, numbers in zip(values, chart.values, strict=True):
        row[: len(numbers)] = numbers
    colours = LinearSegmentedColormap.from_list("heat", ["white", _colours()["heat"]])
    panel.imshow(values, cmap=colours, vmin=0, vmax=chart.top, aspect="auto")
    if columns <= 12:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour = "white" if value > 0.55 * chart.top else _colours()["ink"]
                panel.text(j, i, chart.text(value), ha="center", va="center", color=colour)
    if chart.names or columns <= 30:
        panel.set_xticks(range(columns), chart.heads[:columns], rotation=45 if chart.names else 0)
        panel.set_yticks(range(len(values)), chart.heads[: len(values)])
    return 0


_DRAW: dict[type, Any] = {Lines: _lines, Bars: _bars, HeatMap: _heat_map}
