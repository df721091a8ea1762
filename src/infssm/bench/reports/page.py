"""Templates of the reports: the HTML pages and the charts in them. Text is escaped where it is inserted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from infssm.learner.config.load import flatten

WIDTH, HEIGHT = 560, 300
"""Pixels of a chart with axes."""
LEFT, RIGHT, TOP, BASE = 66, 546, 12, 256
"""Edges of the area inside the axes."""


def render(template: str, **values: Any) -> str:
    """A template of this package with its values filled in; numbers of a drawing are rounded to a tenth of a pixel."""
    return _environment(is_drawing=template.endswith(".svg")).get_template(template).render(values)


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Some names and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


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
    environment.filters |= {"shortened": shortened, "flatten": flatten}
    environment.globals |= {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BASE": BASE}
    return environment
