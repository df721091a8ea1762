"""Charts as inline SVG without scripts, a few kilobytes each.

This is the only chart engine of reports: the HTML page embeds what it returns, coloured by ``report.css`` (light and
dark) with a ``<title>`` on every point for hovering, and ``figures.py`` writes the same shapes to PNG, SVG and PDF.
Charts are strings because a report has up to ten of them and is written after every run: drawing one takes 0.2 ms,
matplotlib needs 40 ms and half a second to be imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 44
SERIES_COLOURS, DASHES = 8, 4
"""Classes ``s0`` to ``s7`` that the page's style must colour, and ``d0`` to ``d3`` that it must dash."""


class Series(NamedTuple):
    """One line of a chart; ``low`` and ``high``, where given, are the edges of a band around it (seeds, say)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float] | None = None,
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    markers: bool = True,
) -> str:
    """Lines over common axes; ``log`` draws log10 of positive values (others are left out)."""
    lines = [_clean(s, log=log) for s in series]
    xs = [x for s in lines for x in s.x] or [0.0, 1.0]
    ys = [y for s in lines for part in (s.y, s.low or (), s.high or ()) for y in part] or [0.0, 1.0]
    low, high = y_range or _padded(min(ys), max(ys))
    x_scale = _Scale(*_distinct(min(xs), max(xs)), _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    y_ticks = _log_ticks(low, high) if log else ticks(low, high)
    parts = _axes(x_scale, y_scale, x_ticks or ticks(x_scale.low, x_scale.high), y_ticks, x_label, y_label, log=log)
    parts += [_band(line, number, x_scale, y_scale) for number, line in enumerate(lines)]
    for number, line in enumerate(lines):
        parts.append(_polyline(line, number, x_scale, y_scale, markers=markers, log=log))
    missing = "never above 0" if log else "no values"
    names = [line.name if len(line.x) else f"{line.name} ({missing})" for line in lines]
    return _svg(parts, _WIDTH, _HEIGHT, f"{y_label} over {x_label}") + legend(names)


def bar_chart(
    labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], *, x_label: str, y_label: str
) -> str:
    """Bars per label, one per group: ``groups`` are (name, value per label)."""
    values = [v for _, vs in groups for v in vs if not math.isnan(v)] or [0.0]
    low, high = _padded(min(0.0, *values), max(0.0, *values))
    low = 0.0 if min(values) >= 0 else low
    high = 0.0 if max(values) <= 0 and low < 0 else high
    y_scale = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    slot = (_WIDTH - _LEFT - _RIGHT) / max(len(labels), 1)
    x_scale = _Scale(-0.5, len(labels) - 0.5, _LEFT, _WIDTH - _RIGHT)
    parts = _axes(x_scale, y_scale, [], ticks(low, high), x_label, y_label)
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_scale(0):.1f}" y2="{y_scale(0):.1f}"/>'
    )
    width = 0.7 * slot / max(len(groups), 1)
    for i, label in enumerate(labels):
        parts.append(_text(x_scale(i), _HEIGHT - _BOTTOM + 16, label))
        for g, (name, heights) in enumerate(groups):
            value = 0.0 if math.isnan(heights[i]) else heights[i]
            top, base = y_scale(max(value, 0.0)), y_scale(min(value, 0.0))
            left = x_scale(i) - 0.35 * slot + g * width
            parts.append(
                f'<rect class="s{g % SERIES_COLOURS} bar" x="{left:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" '
                f'height="{max(base - top, 0.8):.1f}"><title>{escape(name)} {escape(label)}: {value:.2f}</title></rect>'
            )
    chart = _svg(parts, _WIDTH, _HEIGHT, f"{y_label} by {x_label}")
    return chart + (legend([name for name, _ in groups]) if len(groups) > 1 else "")


def heat_map(
    values: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    where: Callable[[int, int], str],
    names: Sequence[str] | None = None,
    top: float = 100.0,
    unit: str = "%",
) -> str:
    """A matrix of percentages, or of values from 0 to ``top`` in another unit; NaN cells are blank.

    Cells show their number where it fits. ``where(i, j)`` describes cell (i, j) in its tooltip; ``names`` replace the
    numbers of rows and columns.
    """
    rows, columns = len(values), max((len(row) for row in values), default=0)
    cell = min(56.0, 440 / max(columns, 1))
    height = cell * 0.72
    margin = 7.2 * max((len(name) for name in names or ()), default=0)
    left, above = 46 + max(16, margin), 26 + max(0, 0.75 * margin - 8)
    width, total = left + columns * cell + max(10, 0.7 * margin), above + rows * height + 30
    parts = []
    if names is not None or cell > 12:
        heads = names or [str(j) for j in range(max(rows, columns))]
        slanted: dict[str, Any] = {"anchor": "start", "turn": -45} if margin > cell else {}
        parts += [_text(left + (j + 0.5) * cell, above - 8, heads[j], **slanted) for j in range(columns)]
        parts += [_text(left - 8, above + (i + 0.5) * height + 4, heads[i], anchor="end") for i in range(rows)]
    short = 1 if top == 100 else 2
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isnan(value):
                text = f"{value:.{short}f}"
                text = text.partition(".")[0] if float(text) in (0.0, 100.0) else text  # short enough for its cell
                title = f"{where(i, j)}: {value:.{short + 1}f} {unit}"
                parts.append(_cell(left + j * cell, above + i * height, cell, height, value / top, title, text))
    parts.append(_text(left + columns * cell / 2, total - 8, x_label, kind="label"))
    parts.append(_text(16, above + rows * height / 2, y_label, kind="label", turn=-90))
    return _svg(parts, width, total, f"{y_label} by {x_label}")


def legend(names: Sequence[str]) -> str:
    """Names with their colours, as HTML under a chart."""
    items = (
        f'<span><svg class="key" viewBox="0 0 30 12" width="30" aria-hidden="true"><line class="{_stroke(i)}" x1="0" '
        f'x2="30" y1="6" y2="6"/>{_marker(i, 15, 6)}</svg>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``count`` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next((m for m in (1, 2, 5) if (high - low) / (step * m) <= count + 0.5), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _clean(series: Series, *, log: bool) -> Series:
    shown = [i for i, y in enumerate(series.y) if math.isfinite(y) and (not log or y > 0)]

    def part(values: Sequence[float] | None) -> list[float] | None:
        return None if values is None else [math.log10(max(values[i], 1e-300)) if log else values[i] for i in shown]

    return Series(series.name, [series.x[i] for i in shown], part(series.y) or [], part(series.low), part(series.high))


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


def _axes(
    x_scale: _Scale,
    y_scale: _Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
) -> list[str]:
    parts = []
    for value in y_ticks:
        y = y_scale(value)
        text = f"{10**value:.0e}".replace("e-0", "e-").replace("e+0", "e") if log else f"{value:g}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, text, anchor="end"))
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    parts += [_text(x_scale(value), base + 16, f"{value:g}") for value in x_ticks]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, kind="label"))
    parts.append(_text(14, (_TOP + base) / 2, y_label, kind="label", turn=-90))
    return parts


def _polyline(line: Series, number: int, x_scale: _Scale, y_scale: _Scale, *, markers: bool, log: bool) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline class="{_stroke(number)}" points="{path}"><title>{escape(line.name)}</title></polyline>']
    if markers:
        for (x, y), x_value, value in zip(points, line.x, line.y, strict=True):
            shown = 10**value if log else value
            parts.append(_marker(number, x, y, f"{line.name} at {x_value:g}: {shown:.4g}"))
    return "".join(parts)


def _stroke(number: int) -> str:
    """Colour and dashes of a line: a line that lies on another one shows it through its gaps."""
    return f"s{number % SERIES_COLOURS} line d{number % DASHES}"


def _marker(number: int, x: float, y: float, title: str = "") -> str:
    """The point of a line: circle, square, diamond or triangle, so that colour is not all that tells lines apart."""
    shapes = ("M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.6L4.6 0L0 4.6L-4.6 0z")
    shape = (*shapes, "M0-4.4L4.2 3.4h-8.4z")[number % 4]
    inner = f"<title>{escape(title)}</title>" if title else ""
    colour = f"s{number % SERIES_COLOURS} dot"
    return f'<path class="{colour}" d="{shape}" transform="translate({x:.1f} {y:.1f})">{inner}</path>'


def _band(line: Series, number: int, x_scale: _Scale, y_scale: _Scale) -> str:
    """The area between ``low`` and ``high``, where the line has them."""
    if line.low is None or line.high is None:
        return ""
    edge = [*zip(line.x, line.high, strict=True), *reversed(list(zip(line.x, line.low, strict=True)))]
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in edge)
    return f'<polygon class="s{number % SERIES_COLOURS} band" points="{path}"/>'


def _cell(x: float, y: float, width: float, height: float, share: float, title: str, number: str) -> str:
    share = min(max(share, 0.0), 1.0)
    text_class = "on-dark" if share > 0.55 else "on-light"
    gap = min(1.0, width / 12)
    box = (
        f'<rect class="cell" x="{x + gap:.1f}" y="{y + gap:.1f}" width="{width - 2 * gap:.1f}" '
        f'height="{height - 2 * gap:.1f}" rx="{3 * gap:.1f}" style="fill-opacity:{0.06 + 0.94 * share:.3f}">'
        f"<title>{escape(title)}</title></rect>"
    )
    return box if width < 30 else box + _text(x + width / 2, y + height / 2 + 4, number, kind=text_class)


def _text(x: float, y: float, text: str, *, kind: str = "tick", anchor: str = "middle", turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
