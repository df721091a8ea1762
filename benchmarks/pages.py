"""Shared by the benchmarks: figures in a JSON file beside a page, tables between the page's markers, kept results.

<!-- table -->          replaced by `write_table`; pages with several tables give each a name of its own
| head | AA |
<!-- end -->
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def read_json(path: Path) -> Any:
    """The contents of a file; an empty dictionary if there is none yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=1, default=str) + "\n"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have a file written under another name first: a process that is stopped leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    write(part)
    os.replace(part, path)


def remembered_tensors(path: Path, compute: Callable[[], Any]) -> Any:
    """What ``compute`` returned when it was first asked, tensors in lists and dictionaries; the file holds it."""
    import torch

    if not path.exists():
        write_whole(path, lambda part: torch.save(compute(), part))
    return torch.load(path, weights_only=True)


def remembered(path: Path, measure: Callable[[], Any], key: str | None = None) -> Any:
    """The first result of ``measure``, as JSON has it; the file holds it, or a value for each key."""
    if key is None:
        if not path.exists():
            write_json(path, measure())
        return read_json(path)
    known = read_json(path)
    if key not in known:
        write_json(path, known | {key: measure()})
    return read_json(path)[key]


def write_table(page: Path, lines: Iterable[str], name: str = "table") -> None:
    """Replace what is between ``<!-- name -->`` and ``<!-- end -->``; appended under a heading where it is new."""
    text, start, end = page.read_text(encoding="utf-8"), f"<!-- {name} -->\n", "<!-- end -->"
    if start not in text:
        text += f"\n## {name}\n\n{start}{end}\n"
    before, _, rest = text.partition(start)
    content = "\n".join(lines)
    page.write_text(f"{before}{start}{content}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def write_tables(page: Path, tables: Mapping[str, Iterable[str]]) -> None:
    """Write several tables, or other lines that are computed, by their names."""
    for name, lines in tables.items():
        write_table(page, lines, name)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> list[str]:
    """The lines of a table, whose last ``numbers`` columns are aligned to the right."""
    rule = "|---" * (len(header) - numbers) + "|---:" * numbers + "|"
    head, *body = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (header, *rows))
    return [head, rule, *body]


def spread(values: Sequence[float], digits: int = 1, scale: float = 1.0) -> str:
    """Mean ± sample standard deviation, times ``scale``; of one value itself, of none ``-``."""
    if not values:
        return "-"
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {scale * statistics.stdev(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of values."""
    return statistics.stdev(values) / len(values) ** 0.5


def paired_gain(values: Sequence[float], others: Sequence[float]) -> str:
    """Difference of values that belong together, as those of one seed: mean ± standard error."""
    differences = [value - other for value, other in zip(values, others, strict=True)]
    return f"{statistics.mean(differences):+.1f} ± {standard_error(differences):.1f}"


def machine() -> dict[str, Any]:
    """Versions, commit and processor, without anything about where files lie."""
    from infssm.learner.devices import commit_of, environment

    found = environment()
    found["commit"] = found["commit"] or commit_of(Path(__file__))  # an installed copy does not know its commit
    return {key: found[key] for key in ("python", "packages", "commit", "cpu", "cores", "threads")}
