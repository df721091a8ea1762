"""Small charts as inline SVG: no script, no network, a few kilobytes each. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 44
SERIES_COLOURS = 8
"""Classes ``s0`` to ``s7`` that the page's style must colour."""


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


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
    ys = [y for s in lines for y in s.y] or [0.0, 1.0]
    low, high = y_range or _padded(min(ys), max(ys))
    x_scale = _Scale(*_distinct(min(xs), max(xs)), _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    y_ticks = _log_ticks(low, high) if log else ticks(low, high)
    parts = _axes(x_scale, y_scale, x_ticks or ticks(x_scale.low, x_scale.high), y_ticks, x_label, y_label, log=log)
    for number, line in enumerate(lines):
        parts.append(_polyline(line, number, x_scale, y_scale, markers=markers, log=log))
    return _svg(parts, _WIDTH, _HEIGHT, f"{y_label} over {x_label}") + legend([s.name for s in series])


def bar_chart(
    labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], *, x_label: str, y_label: str
) -> str:
    """Bars per label, one per group: ``groups`` are (name, value per label)."""
    values = [v for _, vs in groups for v in vs if not math.isnan(v)] or [0.0]
    low, high = _padded(min(0.0, *values), max(0.0, *values))
    low = 0.0 if min(values) >= 0 else low
    y_scale = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    slot = (_WIDTH - _LEFT - _RIGHT) / max(len(labels), 1)
    x_scale = _Scale(-0.5, len(labels) - 0.5, _LEFT, _WIDTH - _RIGHT)
    parts = _axes(x_scale, y_scale, [], ticks(low, high), x_label, y_label)
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


def heat_map(values: Sequence[Sequence[float]], *, x_label: str, y_label: str) -> str:
    """A matrix of percentages, NaN left blank; numbers in the cells while they fit."""
    rows, columns = len(values), max((len(row) for row in values), default=0)
    cell = min(56.0, 440 / max(columns, 1))
    height = cell * 0.72
    left, top = 62, 26
    width, total = left + columns * cell + 10, top + rows * height + 30
    parts = [_text(left + (j + 0.5) * cell, top - 8, str(j)) for j in range(columns)]
    for i, row in enumerate(values):
        middle = top + (i + 0.5) * height
        parts.append(_text(left - 8, middle + 4, str(i), anchor="end"))
        for j, value in enumerate(row):
            if not math.isnan(value):
                parts.append(
                    _cell(left + j * cell, top + i * height, cell, height, value, f"after task {i}, on task {j}")
                )
    parts.append(_label(left + columns * cell / 2, total - 8, x_label))
    parts.append(_label(16, top + rows * height / 2, y_label, turned=True))
    return _svg(parts, width, total, f"{y_label} by {x_label}")


def legend(names: Sequence[str]) -> str:
    """Names with their colours, as HTML under a chart."""
    items = (f'<span><i class="s{i % SERIES_COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(items)}</div>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``count`` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next((m for m in (1, 2, 5) if (high - low) / (step * m) <= count + 0.5), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _clean(series: Series, *, log: bool) -> Series:
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y) and (not log or y > 0)]
    return Series(series.name, [x for x, _ in pairs], [math.log10(y) if log else y for _, y in pairs])


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
    parts.append(_label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label))
    parts.append(_label(14, (_TOP + base) / 2, y_label, turned=True))
    return parts


def _polyline(line: Series, number: int, x_scale: _Scale, y_scale: _Scale, *, markers: bool, log: bool) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    colour = f"s{number % SERIES_COLOURS}"
    parts = [f'<polyline class="{colour} line" points="{path}"><title>{escape(line.name)}</title></polyline>']
    if markers:
        for (x, y), x_value, value in zip(points, line.x, line.y, strict=True):
            shown = 10**value if log else value
            parts.append(
                f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
                f"<title>{escape(line.name)} at {x_value:g}: {shown:.4g}</title></circle>"
            )
    return "".join(parts)


def _cell(x: float, y: float, width: float, height: float, value: float, where: str) -> str:
    share = min(max(value / 100, 0.0), 1.0)
    text_class = "on-dark" if share > 0.55 else "on-light"
    box = (
        f'<rect class="cell" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}" rx="3" '
        f'style="fill-opacity:{0.06 + 0.94 * share:.3f}"><title>{where}: {value:.2f} %</title></rect>'
    )
    return box if width < 30 else box + _text(x + width / 2, y + height / 2 + 4, f"{value:.1f}", kind=text_class)


def _text(x: float, y: float, text: str, *, kind: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _label(x: float, y: float, text: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="middle"{turn}>{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
