"""Studies: functions that return numbers, a figure and a text computed from the numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from infssm._registry import Registry, check_options, suggest
from infssm.errors import ConfigError
from infssm.ssm import list_distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Study:
    """The outcome of a study: ``data`` is plain JSON values, ``text`` a few sentences computed from it."""

    name: str
    data: dict[str, Any]
    figure: Figure
    text: str

    def save(self, out: str | os.PathLike[str]) -> Path:
        """Write ``<name>.json``, ``<name>.png`` and ``<name>.md`` into ``out`` and return the figure's path."""
        stem = Path(out) / self.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        page = f"# {self.name}\n\n{self.text}\n\n![]({self.name}.png)\n"
        stem.with_suffix(".json").write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(page, encoding="utf-8")
        self.figure.savefig(stem.with_suffix(".png"), dpi=130, bbox_inches="tight")
        return stem.with_suffix(".png")


_STUDIES: Registry[Callable[..., Study]] = Registry("study")
register_study = _STUDIES.register
_LEAST = {"seed": 0, "task": -1}
"""Smallest values of whole numbers that are no counts; task -1 is the last one."""


def list_studies() -> list[str]:
    """Names of all studies."""
    return list(_STUDIES)


def describe_study(name: str) -> str:
    """The first line of a study's docstring."""
    return (_STUDIES[name].__doc__ or "").strip().partition("\n")[0]


def run_study(name: str, **options: Any) -> Study:
    """Run the named study; options are those of its function, with values of its types and counts of at least 1."""
    study = _STUDIES[name]
    lax = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    checked = check_options(f"study {name!r}", study, options, lax)
    for key, value in checked.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < _LEAST.get(key, 1):
            raise ConfigError(f"study {name!r}: {key}={value} is too small")
    return study(**checked)


def choose_kinds(kinds: str | Sequence[str]) -> list[str]:
    """Distances by name: ``"all"``, one, several with commas between them, or a list."""
    known = list_distances()
    chosen = known if kinds == "all" else kinds.split(",") if isinstance(kinds, str) else list(kinds)
    for kind in chosen:
        if kind not in known:
            raise ConfigError(f"unknown distance {kind!r}{suggest(kind, known)}")
    return chosen


def axes(columns: int = 1, width: float = 5.0, height: float = 3.4, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A grid of empty axes in the common style, row by row."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("studies draw figures with matplotlib: pip install 'infssm[bench]'") from None
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure, panels
