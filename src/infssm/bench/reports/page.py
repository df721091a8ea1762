"""The HTML page around the charts: one file, no script, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from infssm.learner.store.settings import flatten


def page(title: str, subtitle: str, parts: Iterable[str]) -> str:
    """A whole document."""
    style = (files("infssm.bench.reports") / "report.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style>'
    )
    body = f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>{"".join(parts)}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Headline numbers: (label, value)."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in values
    )
    return f'<div class="tiles">{inner}</div>'


def card(title: str, content: str, note: str = "") -> str:
    """A titled box."""
    tail = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{content}{tail}</section>'


def wide(content: str) -> str:
    """A row of its own."""
    return f'<div class="wide">{content}</div>'


def columns(cards: Iterable[str]) -> str:
    """Boxes side by side, wrapped to the width of the page."""
    return f'<div class="columns">{"".join(cards)}</div>'


def tasks(names: Sequence[Sequence[str]]) -> str:
    """The classes of each task, in small print."""
    items = "".join(f"<li><b>task {t}</b> {escape(shortened(classes))}</li>" for t, classes in enumerate(names))
    return f'<ul class="tasks">{items}</ul>' if items else ""


def shortened(classes: Sequence[str], most: int = 6) -> str:
    """Some names and how many more there are."""
    rest = f" and {len(classes) - most} more" if len(classes) > most else ""
    return ", ".join(classes[:most]) + rest


def bars(values: Sequence[tuple[str, float]]) -> str:
    """Percentages by name, each with a bar; NaN has none."""
    rows = []
    for name, value in values:
        known = not math.isnan(value)
        width, text = (f"{value:.1f}%", f"{value:.1f}") if known else ("0", "-")
        shown = escape(name)
        rows.append(f'<div><span title="{shown}">{shown}</span><i style="width:{width}"></i><em>{text}</em></div>')
    return f'<div class="classes">{"".join(rows)}</div>'


def _kept(cell: str) -> str:
    """A cell's text; where it has to break, the spread stays with its sign."""
    return escape(cell).replace("± ", "±&nbsp;")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], best: Iterable[tuple[int, int]] = ()) -> str:
    """A table; ``best`` are (row, column) cells to mark."""
    marked = set(best)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = ""
    for i, row in enumerate(rows):
        cells = (
            f'<td class="best">{_kept(c)}</td>' if (i, j) in marked else f"<td>{_kept(c)}</td>"
            for j, c in enumerate(row)
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def settings(title: str, values: Mapping[str, Any]) -> str:
    """Nested settings as a folded list of dotted names."""
    pairs = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in flatten(values))
    inner = f"<details open><summary>{escape(title)}</summary><dl>{pairs}</dl></details>"
    return f'<section class="card wide">{inner}</section>'
