"""Charts of reports: what they show, and how they are drawn as inline SVG.

The HTML page embeds the SVG, coloured by ``report.css`` (light and dark), with a ``<title>`` on every point that is
shown when it is hovered; ``figures.py`` draws the same charts to files with matplotlib. The page has drawings of its
own because a report has up to ten charts and is written after every run: one takes about a millisecond, while
matplotlib needs 40 ms, half a second to be imported, and knows neither dark pages nor hovering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from infssm.bench.reports.text import BASE, LEFT, RIGHT, TOP, render


class Series(NamedTuple):
    """One line of a chart; ``low`` and ``high``, where given, are the edges of a band around it (seeds, say)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    @property
    def points(self) -> list[tuple[float, float]]:
        """Points of the line."""
        return list(zip(self.x, self.y, strict=True))

    @property
    def around(self) -> list[tuple[float, float]]:
        """Corners of the band."""
        return [*zip(self.x, self.high or (), strict=True), *zip(self.x[::-1], (self.low or ())[::-1], strict=True)]

    def drawable(self, *, log: bool) -> Series:
        """The points that can be drawn: finite, and for a logarithmic axis positive."""
        kept = [i for i, y in enumerate(self.y) if math.isfinite(y) and (not log or y > 0)]
        x, y, low, high = (None if part is None else [part[i] for i in kept] for part in self[1:])
        return Series(self.name, x or [], y or [], low, high)


@dataclass(frozen=True)
class Lines:
    """Lines over common axes; on a logarithmic axis values that are not positive are left out."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    x_ticks: Sequence[float] = ()
    y_range: tuple[float, float] | None = None
    log: bool = False
    markers: bool = True

    def svg(self) -> str:
        """The chart for a page."""
        lines = [series.drawable(log=self.log) for series in self.series]

        def level(value: float) -> float:
            return math.log10(max(value, 1e-300)) if self.log else value

        xs = [x for line in lines for x in line.x] or [0.0, 1.0]
        ys = [level(y) for line in lines for part in line[2:] for y in part or ()] or [0.0, 1.0]
        low, high = self.y_range or _padded(min(ys), max(ys))
        x, y = _Scale(*_distinct(min(xs), max(xs)), LEFT, RIGHT), _Scale(low, high, BASE, TOP)
        shown = [(v, f"{v:g}") for v in ticks(low, high)]
        if self.log:
            shown = [(v, f"{10**v:.0e}".replace("e-0", "e-").replace("e+0", "e")) for v in _log_ticks(low, high)]
        missing = "never above 0" if self.log else "no values"
        return render(
            "lines.svg",
            chart=self,
            lines=lines,
            names=[line.name if line.x else f"{line.name} ({missing})" for line in lines],
            x=x,
            y=lambda value: y(level(value)),
            x_ticks=[(x(v), f"{v:g}") for v in self.x_ticks or ticks(x.low, x.high)],
            y_ticks=[(y(v), text) for v, text in shown],
        )


@dataclass(frozen=True)
class Bars:
    """Bars for each label, one per group: ``groups`` are (name, value for each label)."""

    labels: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]
    x_label: str
    y_label: str

    def svg(self) -> str:
        """The chart for a page."""
        values = [v for _, vs in self.groups for v in vs if not math.isnan(v)] or [0.0]
        low, high = _padded(min(0.0, *values), max(0.0, *values))
        low = 0.0 if min(values) >= 0 else low
        high = 0.0 if max(values) <= 0 and low < 0 else high
        x, y = _Scale(-0.5, len(self.labels) - 0.5, LEFT, RIGHT), _Scale(low, high, BASE, TOP)
        return render(
            "bars.svg",
            chart=self,
            x=x,
            y=y,
            width=0.7 * (x(1) - x(0)) / len(self.groups),
            x_ticks=[(x(i), label) for i, label in enumerate(self.labels)],
            y_ticks=[(y(v), f"{v:g}") for v in ticks(low, high)],
        )


@dataclass(frozen=True)
class HeatMap:
    """A matrix of percentages, or of values from 0 to ``top`` in another unit; NaN cells are blank.

    Cells show their number where it fits. ``where(i, j)`` describes cell (i, j) when it is hovered; ``names`` replace
    the numbers of rows and columns, which count from 1.
    """

    values: Sequence[Sequence[float]]
    x_label: str
    y_label: str
    where: Callable[[int, int], str]
    names: Sequence[str] = ()
    top: float = 100.0
    unit: str = "%"

    @property
    def columns(self) -> int:
        """Number of columns."""
        return max((len(row) for row in self.values), default=0)

    @property
    def heads(self) -> Sequence[str]:
        """Names of rows and columns."""
        return self.names or [str(j + 1) for j in range(max(len(self.values), self.columns))]

    def text(self, value: float) -> str:
        """A value, short enough for its cell."""
        text = f"{value:.{1 if self.top == 100 else 2}f}"
        return text.partition(".")[0] if float(text) in (0.0, 100.0) else text

    def svg(self) -> str:
        """The chart for a page."""
        width = min(56.0, 440 / max(self.columns, 1))
        height, margin = 0.72 * width, 7.2 * max(map(len, self.names), default=0)
        left, top = 46 + max(16, margin), 26 + max(0, 0.75 * margin - 8)
        digits = 2 if self.top == 100 else 3
        cells = []
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    share = min(max(value / self.top, 0.0), 1.0)
                    title = f"{self.where(i, j)}: {value:.{digits}f} {self.unit}"
                    cells.append((left + j * width, top + i * height, share, title, self.text(value)))
        gap, sizes = min(1.0, width / 12), {"left": left, "top": top, "margin": margin}
        return render("heat_map.svg", chart=self, cells=cells, width=width, height=height, gap=gap, **sizes)


@dataclass(frozen=True)
class Chart:
    """A chart of a report with its ``title`` and ``note``; ``name`` is for files.

    ``drawing`` is a sentence where there is nothing to draw, of one task for instance. ``tasks`` are the classes of
    each task, listed below the chart.
    """

    name: str
    title: str
    drawing: Lines | Bars | HeatMap | str
    note: str = ""
    tasks: Sequence[Sequence[str]] = ()

    def html(self) -> Markup:
        """The drawing for a page; its template has escaped what it shows."""
        return Markup("<p>{}</p>").format(self.drawing) if isinstance(self.drawing, str) else Markup(self.drawing.svg())


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``count`` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next((m for m in (1, 2, 5) if (high - low) / (step * m) <= count + 0.5), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    low, high = _distinct(low, high)
    return low - 0.04 * (high - low), high + 0.06 * (high - low)


def _distinct(low: float, high: float) -> tuple[float, float]:
    least = max(1e-9, 1e-9 * max(abs(low), abs(high)))  # below this, floats cannot be told apart on an axis
    if high - low > least:
        return low, high
    half = max(0.5, 500 * least)
    return low - half, high + half


def _log_ticks(low: float, high: float) -> list[float]:
    whole = [float(k) for k in range(math.ceil(low), math.floor(high) + 1)]
    if len(whole) > 2:
        return whole[:: max(1, len(whole) // 6)]
    finer = (k + math.log10(m) for k in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5))
    return [value for value in finer if low <= value <= high]
