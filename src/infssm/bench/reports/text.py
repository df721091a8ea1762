"""Text of reports: HTML pages and charts from templates, tables as Markdown and LaTeX; all escaped."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from infssm.data.files import shown
from infssm.learner.config.load import flatten

WIDTH, HEIGHT = 560, 300
"""Pixels of a chart with axes."""
LEFT, RIGHT, TOP, BASE = 66, 546, 12, 256
"""Edges of the area inside the axes."""

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{char: f"\\{char}" for char in "{}#$%&_"},
}


def render(template: str, **values: Any) -> str:
    """A template of this package with its values filled in; numbers of a drawing are rounded to a tenth of a pixel."""
    return _environment(is_drawing=template.endswith(".svg")).get_template(template).render(values)


@cache
def _environment(*, is_drawing: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("infssm.bench.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=(lambda value: round(value, 1) if isinstance(value, float) else value) if is_drawing else None,
    )
    environment.filters |= {"shown": shown, "flatten": flatten}
    environment.globals |= {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BASE": BASE}
    return environment


def one_line(text: str) -> str:
    """The text with every line break, tab and other control character as one space: a cell is one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def latex(text: str) -> str:
    """The text for a LaTeX paragraph or table cell."""
    return "".join(_LATEX.get(char, char) for char in one_line(text))


def markdown(text: str) -> str:
    """The text for a Markdown heading or table cell; underscores inside words need no escape."""
    text = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*|\[\]#$~])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1, best: Collection[tuple[int, int]] = ()
) -> str:
    """A table whose first ``names`` columns are aligned left; ``best`` are (row, column) of cells in bold."""
    ruler = ["---"] * names + ["---:"] * (len(header) - names)
    cells = [
        [f"**{markdown(cell)}**" if (i, j) in best else markdown(cell) for j, cell in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*map(markdown, header)], ruler, *cells))


def latex_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    best: Collection[tuple[int, int]] = (),
) -> str:
    """A booktabs table, of one column of names and numbers, or ``align``; ``best`` as in :func:`markdown_table`."""
    lines = [" & ".join(map(latex, header)) + r" \\", r"\midrule"]
    for i, row in enumerate(rows):
        cells = [rf"\textbf{{{latex(cell)}}}" if (i, j) in best else latex(cell) for j, cell in enumerate(row)]
        lines.append(" & ".join(cells) + r" \\")
    align = align or "l" + "r" * (len(header) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{align}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"])
