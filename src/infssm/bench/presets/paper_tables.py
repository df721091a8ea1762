"""Measured results beside the paper's, as Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infssm.bench.presets.paper import TABLES, Cell
from infssm.bench.reports.page import render
from infssm.bench.reports.text import latex_table, markdown_table

_MEASURES = {"AA": "aa", "AIA": "aia", "FM": "fm"}
_MISSING = "missing"
_NOTE = (
    "Percent; mean ± sample standard deviation over seeds; in brackets measured less published. FM: lower is better. "
    "Measured values marked * come from runs whose settings differ from the preset's; the differences are listed below."
)


def render_paper(cells: Sequence[Cell], form: str) -> str:
    """The tables in one of :data:`PAPER_FORMATS`."""
    return PAPER_FORMATS[form](cells)


def _markdown(cells: Sequence[Cell]) -> str:
    parts = ["# Beside the paper", coverage(cells), _NOTE]
    for title, mine in _tables(cells):
        parts += [f"## {title}", markdown_table(_HEADER, [_row(cell) for cell in mine], names=3)]
        if commands := _commands(mine):
            parts.append("\n".join(["To fill the missing cells:", "", "```bash", *commands, "```"]))
        if notes := _differing(mine):
            parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _latex(cells: Sequence[Cell]) -> str:
    blocks = [f"% {coverage(cells)}"]
    for title, mine in _tables(cells):
        table = latex_table(_HEADER, [_row(cell) for cell in mine], align="lrl" + "r" * (len(_HEADER) - 3))
        comments = [*(f"% missing: {c}" for c in _commands(mine)), *(f"% {note}" for note in _differing(mine))]
        blocks.append("\n".join([f"% {title}", table, *comments]))
    return "\n\n".join(blocks) + "\n"


def _html(cells: Sequence[Cell]) -> str:
    parts = []
    for title, mine in _tables(cells):
        rows = [[", ".join(row[:3]), *row[3:]] for row in map(_row, mine)]
        commands = {row[0]: cell.command for cell, row in zip(mine, rows, strict=True) if cell.measured is None}
        note = " ".join([_NOTE, *_differing(mine)])
        parts.append({"title": title, "rows": rows, "note": note, "commands": commands})
    header = [", ".join(_HEADER[:3]), *_HEADER[3:]]
    return render("paper.html", title="Beside the paper", subtitle=coverage(cells), header=header, parts=parts)


PAPER_FORMATS: dict[str, Callable[[Sequence[Cell]], str]] = {"md": _markdown, "tex": _latex, "html": _html}


def coverage(cells: Sequence[Cell]) -> str:
    """How many rows have been measured, in a sentence."""
    done = sum(cell.measured is not None for cell in cells)
    changed = sum(cell.measured is not None and bool(cell.measured.differences) for cell in cells)
    tail = f", {changed} of them with changed settings" if changed else ""
    return f"{done} of {len(cells)} published rows measured{tail}; {len(cells) - done} missing."


_HEADER = ["data set", "tasks", "method"] + [f"{m} {part}" for m in _MEASURES for part in ("paper", "ours")] + ["seeds"]


def _tables(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    ordered = sorted(cells, key=lambda cell: (cell.tasks, datasets.index(cell.dataset)))
    return [(title, [cell for cell in ordered if cell.table == table]) for table, title in TABLES.items()]


def _row(cell: Cell) -> list[str]:
    row = [cell.dataset, str(cell.tasks), cell.method]
    mark = "*" if cell.measured and cell.measured.differences else ""
    for published, measure in _MEASURES.items():
        paper = cell.paper[published]
        row.append(f"{paper['mean']:.2f} ± {paper['std']:.2f}")
        mine = cell.measured.measures[measure] if cell.measured else None
        if mine is None or math.isnan(mine.mean):
            row.append(_MISSING)
        else:
            row.append(f"{mine.format()}{mark} ({100 * mine.mean - paper['mean']:+.2f})")
    return [*row, str(len(cell.measured.seeds)) if cell.measured else "0"]


def _commands(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.command for cell in cells if cell.measured is None))


def _differing(cells: Sequence[Cell]) -> list[str]:
    """What starred rows changed, ``preset: setting: published value != value of the run``."""
    lines = [
        f"* {cell.preset}: {'; '.join(cell.measured.differences)}."
        for cell in cells
        if cell.measured and cell.measured.differences
    ]
    return list(dict.fromkeys(lines))
