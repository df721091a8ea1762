"""The charts of a report as files: PNG, SVG and PDF.

A chart is the SVG that also stands in the HTML report. Matplotlib only writes its shapes to files, in all three formats
with embedded fonts; axes, ticks and layout are decided in one place, ``svg.py``.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infssm._files import explained
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_FORMATS = ("png", "svg", "pdf")
_INCH = 100.0
"""Pixels of a chart per inch on paper: a line chart of 560 pixels fits the column of an article."""
_POINT = 72 / _INCH
_LEGEND_LINE, _LETTER = 20.0, 6.6
_MARKERS = ("o", "s", "D", "^")
_DASHES: dict[str, Any] = {"d0": "-", "d1": (0, (3.5, 2)), "d2": (0, (1, 1.5)), "d3": (0, (4.5, 1.5, 1, 1.5))}
"""As in report.css, in widths of the line."""


class Chart(NamedTuple):
    """A chart of a report: ``name`` for files, ``drawing`` as SVG and legend, ``title`` and ``note`` around it."""

    name: str
    title: str
    drawing: str
    note: str = ""


def write_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as PNG, SVG and PDF to ``folder`` and return the paths."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ConfigError("figures are written with matplotlib: pip install 'infssm[bench]'") from None
    written = []
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Text stays text in PDF (TrueType instead of matplotlib's Type 3, which many publishers refuse); a fixed salt
        # and no date make the same chart the same file.
        with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "infssm", "font.size": 12 * _POINT}):
            for chart in charts:
                if "<svg" not in chart.drawing:  # a sentence instead: one task only, say
                    continue
                figure = _draw(ET.fromstring(f"<div>{chart.drawing}</div>"))
                for form in FIGURE_FORMATS:
                    stem = re.sub(r"[^\w.+=-]+", "-", chart.name).strip("-.")[:100]
                    written.append(folder / f"{stem}.{form}")
                    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
                    figure.savefig(written[-1], dpi=300, metadata=metadata)
    return written


@cache
def _colours() -> dict[str, str]:
    """The colours of the light page, by name."""
    style = (files("infssm.bench.reports") / "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+)", style.partition("}")[0]))


def _draw(fragment: ET.Element) -> Figure:
    from matplotlib.figure import Figure

    drawing = next(iter(fragment))
    width, height = map(float, drawing.get("viewBox", "0 0 1 1").split()[2:])
    names = ["".join(span.itertext()) for span in fragment.iter("span")]
    places, bottom = _legend_places(names, width, height)
    figure = Figure(figsize=(width / _INCH, bottom / _INCH))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, width), ylim=(bottom, 0))
    panel.set_axis_off()
    for shape in drawing:
        _SHAPES[shape.tag](panel, shape)
    for (x, y), span in zip(places, fragment.iter("span"), strict=True):
        for shape in next(iter(span)):
            shape.set("offset", f"{x} {y - 6}")
            _SHAPES[shape.tag](panel, shape)
        panel.text(x + 36, y, "".join(span.itertext()), va="center", color=_colours()["ink"])
    return figure


def _legend_places(names: list[str], width: float, top: float) -> tuple[list[tuple[float, float]], float]:
    """Where each name of the legend goes, in lines below the chart, and where the figure ends."""
    places, x, y = [], 10.0, top + _LEGEND_LINE / 2
    for name in names:
        size = 52 + _LETTER * len(name)
        if x > 10 and x + size > width:
            x, y = 10.0, y + _LEGEND_LINE
        places.append((x, y))
        x += size
    return places, y + _LEGEND_LINE / 2 if names else top


def _number(shape: ET.Element, name: str) -> float:
    return float(shape.get(name, 0))


def _colour(shape: ET.Element) -> str:
    series = re.search(r"\bs(\d)\b", shape.get("class", ""))
    return _colours()[f"c{series[1]}"] if series else _colours()["line" if shape.get("class") == "grid" else "soft"]


def _points(shape: ET.Element) -> list[tuple[float, float]]:
    pairs = (point.split(",") for point in shape.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]


def _line(panel: Axes, shape: ET.Element) -> None:
    if shape.tag == "polyline":
        points = _points(shape)
    else:
        dx, dy = map(float, shape.get("offset", "0 0").split())
        points = [(_number(shape, f"x{end}") + dx, _number(shape, f"y{end}") + dy) for end in "12"]
    dashes = next((_DASHES[name] for name in shape.get("class", "").split() if name in _DASHES), "-")
    thick = 2 if "line" in shape.get("class", "").split() else 1
    panel.plot(
        *zip(*points, strict=True) if points else ([], []), color=_colour(shape), linestyle=dashes, lw=thick * _POINT
    )


def _dot(panel: Axes, shape: ET.Element) -> None:
    x, y = map(float, re.findall(r"-?[\d.]+", shape.get("transform", "")))
    dx, dy = map(float, shape.get("offset", "0 0").split())
    series = re.search(r"\bs(\d)\b", shape.get("class", ""))
    marker = _MARKERS[int(series[1]) % 4] if series else "o"
    panel.plot([x + dx], [y + dy], marker, color=_colour(shape), markersize=7 * _POINT, markeredgewidth=0)


# The same zorder for all shapes: what comes later in the SVG lies above.
def _band(panel: Axes, shape: ET.Element) -> None:
    panel.fill(*zip(*_points(shape), strict=True), color=_colour(shape), alpha=0.13, linewidth=0, zorder=2)


def _box(panel: Axes, shape: ET.Element) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = (_number(shape, name) for name in ("x", "y", "width", "height"))
    cell = shape.get("class") == "cell"
    opacity = float(shape.get("style", "fill-opacity:1").partition(":")[2])
    colour = _colours()["heat"] if cell else _colour(shape)
    panel.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=opacity, linewidth=0, zorder=2))


def _text(panel: Axes, shape: ET.Element) -> None:
    turn = re.search(r"rotate\((-?\d+)", shape.get("transform", ""))
    anchor: Any = {"middle": "center", "end": "right"}.get(shape.get("text-anchor", ""), "left")
    colour = _colours()[{"on-dark": "on-heat", "on-light": "ink"}.get(shape.get("class", ""), "soft")]
    panel.text(
        _number(shape, "x"), _number(shape, "y"), shape.text or "", color=colour, ha=anchor, va="baseline",
        rotation=-float(turn[1]) if turn else 0.0, rotation_mode="anchor", parse_math=False,
    )  # fmt: skip


_SHAPES = {"line": _line, "polyline": _line, "path": _dot, "polygon": _band, "rect": _box, "text": _text}
