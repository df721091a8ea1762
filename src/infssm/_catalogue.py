"""Names and docstrings of the methods, read from their source files: listing them does not import torch."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Text(NamedTuple):
    """A docstring in parts: its first paragraph, the rest, and the paragraph after ``Paper:``."""

    summary: str
    details: str
    paper: str

    @classmethod
    def of(cls, docstring: str | None) -> Text:
        """Parse a docstring."""
        first, *rest = [" ".join(part.split()) for part in inspect.cleandoc(docstring or "").split("\n\n")]
        papers = [part.removeprefix("Paper: ") for part in rest if part.startswith("Paper: ")]
        details = " ".join(part for part in rest if not part.startswith("Paper: "))
        return cls(first, details, papers[0] if papers else "")


def read_methods() -> dict[str, Text] | None:
    """Every method of this package by name; None if plugins add methods, which must be imported to be listed."""
    spec = find_spec("infssm.methods")
    if spec is None or spec.origin is None or entry_points(group="infssm.methods"):
        return None
    found: dict[str, Text] = {}
    for file in Path(spec.origin).parent.rglob("*.py"):
        for cls in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(cls, ast.ClassDef) or "register_method" not in map(ast.unparse, cls.decorator_list):
                continue
            for node in cls.body:  # the string that the class body assigns to `name`
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "name":
                    found[ast.literal_eval(node.value)] = Text.of(ast.get_docstring(cls))
    return dict(sorted(found.items()))
