"""Names of users' data, methods and files as text of other formats."""

from __future__ import annotations

import re

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
