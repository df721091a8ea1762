"""The paper's result tables cell by cell: which preset fills each, what complete runs measured, and both as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from infssm.bench.presets.load import VARIANTS, list_presets, load_preset, paper_numbers
from infssm.bench.reports.text import latex_table, markdown_table, render
from infssm.errors import InfssmError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import FREE, differences, flatten, load_config, to_dict
from infssm.learner.metrics import Summary, summarize
from infssm.learner.store.directory import RunDirectory
from infssm.methods import method_options

TABLES = {
    "Table 1": "Table 1: replay methods with and without Inf-SSM",
    "Table 11": "Tables 2 and 11: exemplar-free methods, (A, B, C)",
    "Table 6": "Table 6: exemplar-free methods, (A, C)",
    "Table 7": "Table 7: which blocks to regularize",
    "Table 9": "Table 9: Inf-SSM and Inf-SSM+",
    "Table 10": "Table 10: Vim-tiny",
}
"""Tables of the report in the paper's order; Table 2 is Table 11 without UCL."""

_IGNORED = (
    *FREE,
    "seed",
    "train.task0",
    "train.accelerator",
    "train.devices",
    "train.eval_batch_size",
    "train.threads",
)
"""Settings in which a run may differ from its preset and still count as that preset's."""

_MEASURES = {"AA": "aa", "AIA": "aia", "FM": "fm"}
_MISSING = "missing"
_NOTE = (
    "Percent; mean ± sample standard deviation over seeds; in brackets measured less published. FM: lower is better. "
    "Measured values marked * come from runs whose settings differ from the preset's; the differences are listed below."
)
_HEADER = ["data set", "tasks", "method"] + [f"{m} {part}" for m in _MEASURES for part in ("paper", "ours")] + ["seeds"]


@dataclass(frozen=True)
class Measured:
    """What runs of a preset gave: metrics over seeds, and in which settings the runs differ from the preset."""

    seeds: tuple[int, ...]
    metrics: Mapping[str, Summary]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One row of a published table. ``paper`` holds AA, AIA and FM in percent, each with mean and std."""

    table: str
    dataset: str
    tasks: int
    method: str
    preset: str
    paper: Mapping[str, Mapping[str, float]]
    measured: Measured | None = None

    @property
    def command(self) -> str:
        """The command that fills the cell, with the paper's seeds."""
        return f"infssm run -p {self.preset} --seed 0 10 100"


@cache
def paper_cells() -> tuple[Cell, ...]:
    """All rows of the result tables but those of Table 2, which Table 11 repeats.

    A row without a preset of its own is filled by the preset of the same method in Table 11: Inf-SSM in Tables 6 and 9
    is the same run, and Table 6's Seq is Table 11's set-up with another published number.
    """
    presets = {_key(preset.paper): name for name in list_presets() if (preset := load_preset(name)).paper is not None}
    cells = []
    for row in paper_numbers()["results"]:
        if row["table"] == "Table 2":
            continue
        name = presets.get(_key(row)) or presets[_key({**row, "table": "Table 11"})]
        paper = {measure: row[measure] for measure in ("AA", "AIA", "FM")}
        cells.append(Cell(row["table"], row["dataset"], row["n_tasks"], _method(row), name, paper))
    return tuple(cells)


def compare_with_paper(runs: Sequence[RunDirectory]) -> list[Cell]:
    """The paper's tables with what the runs measured; cells without a run have ``measured=None``.

    A run belongs to a preset of its benchmark with the same method and method options. Runs that changed other
    settings are shown where no faithful ones are, with the differences from the closer variant of the preset.
    """
    by_preset: dict[str, dict[tuple[str, ...], dict[int, RunDirectory]]] = {}
    presets = list_presets()
    for run in runs:
        config = load_config(run.config())
        for name in presets:
            if name.rpartition("/")[0] == config.benchmark_name:
                close = [d for variant in VARIANTS if (d := _differences(config, name, variant)) is not None]
                if close:  # a seed counts once
                    groups = by_preset.setdefault(name, {})
                    groups.setdefault(min(close, key=len), {}).setdefault(config.seed, run)
    measured = {}
    for name, groups in by_preset.items():
        differing = min(groups, key=lambda d, groups=groups: (len(d), -len(groups[d])))  # type: ignore[misc]
        members = dict(sorted(groups[differing].items()))
        metrics = summarize([run.matrix() for run in members.values()])
        measured[name] = Measured(tuple(members), metrics, differing)
    return [replace(cell, measured=measured.get(cell.preset)) for cell in paper_cells()]


def _differences(config: RunConfig, name: str, variant: str) -> tuple[str, ...] | None:
    """Settings in which a run differs from a preset; None if it is another method."""
    preset = _resolved(name, variant)
    if config.method.name != preset.method.name or _options(config) != _options(preset):
        return None
    mine, theirs = ({**to_dict(c), "method": {}} for c in (config, preset))
    if config.model.weights and preset.model.weights:  # the path of the file does not matter; starting without one does
        mine["model"]["weights"] = theirs["model"]["weights"]
    return tuple(differences(*(dict(flatten(values, without=_IGNORED)) for values in (theirs, mine))))


def _options(config: RunConfig) -> dict[str, Any] | None:
    try:
        return dict(method_options(config.method.name, config.method.options))
    except InfssmError:
        return None


@cache
def _resolved(name: str, variant: str) -> RunConfig:
    return load_config(load_preset(name, variant).values)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["table"], row["dataset"], row["n_tasks"], row["backbone"], _method(row)


def _method(row: Mapping[str, Any]) -> str:
    """The row's name in its table: the method, in Table 7 the blocks."""
    name: str = row["blocks"] if "blocks" in row else row["method"]
    return name


def _markdown(cells: Sequence[Cell]) -> str:
    parts = ["# Beside the paper", coverage(cells), _NOTE]
    for title, mine in _tables(cells):
        parts += [f"## {title}", markdown_table(_HEADER, [_cells(cell) for cell in mine], names=3)]
        if commands := _commands(mine):
            parts.append("\n".join(["To fill the missing cells:", "", "```bash", *commands, "```"]))
        if notes := _differing(mine):
            parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _latex(cells: Sequence[Cell]) -> str:
    blocks = [f"% {coverage(cells)}"]
    for title, mine in _tables(cells):
        table = latex_table(_HEADER, [_cells(cell) for cell in mine], align="lrl" + "r" * (len(_HEADER) - 3))
        comments = [*(f"% missing: {c}" for c in _commands(mine)), *(f"% {note}" for note in _differing(mine))]
        blocks.append("\n".join([f"% {title}", table, *comments]))
    return "\n\n".join(blocks) + "\n"


def _html(cells: Sequence[Cell]) -> str:
    parts = []
    for title, mine in _tables(cells):
        rows = [[", ".join(row[:3]), *row[3:]] for row in map(_cells, mine)]
        commands = {row[0]: cell.command for cell, row in zip(mine, rows, strict=True) if cell.measured is None}
        note = " ".join([_NOTE, *_differing(mine)])
        parts.append({"title": title, "rows": rows, "note": note, "commands": commands})
    header = [", ".join(_HEADER[:3]), *_HEADER[3:]]
    return render("paper.html", title="Beside the paper", subtitle=coverage(cells), header=header, parts=parts)


def coverage(cells: Sequence[Cell]) -> str:
    """How many rows have been measured, in a sentence."""
    done = sum(cell.measured is not None for cell in cells)
    changed = sum(cell.measured is not None and bool(cell.measured.differences) for cell in cells)
    tail = f", {changed} of them with changed settings" if changed else ""
    return f"{done} of {len(cells)} published rows measured{tail}; {len(cells) - done} missing."


def _tables(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    ordered = sorted(cells, key=lambda cell: (cell.tasks, datasets.index(cell.dataset)))
    return [(title, [cell for cell in ordered if cell.table == table]) for table, title in TABLES.items()]


def _cells(cell: Cell) -> list[str]:
    row = [cell.dataset, str(cell.tasks), cell.method]
    mark = "*" if cell.measured and cell.measured.differences else ""
    for published, measure in _MEASURES.items():
        paper = cell.paper[published]
        row.append(f"{paper['mean']:.2f} ± {paper['std']:.2f}")
        mine = cell.measured.metrics[measure] if cell.measured else None
        if mine is None or math.isnan(mine.mean):
            row.append(_MISSING)
        else:
            row.append(f"{mine.format()}{mark} ({100 * mine.mean - paper['mean']:+.2f})")
    return [*row, str(len(cell.measured.seeds)) if cell.measured else "0"]


def _commands(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.command for cell in cells if cell.measured is None))


def _differing(cells: Sequence[Cell]) -> list[str]:
    """The changes of starred rows, ``preset: setting: published value != value of the run``."""
    lines = [
        f"* {cell.preset}: {'; '.join(cell.measured.differences)}."
        for cell in cells
        if cell.measured and cell.measured.differences
    ]
    return list(dict.fromkeys(lines))


PAPER_FORMATS: dict[str, Callable[[Sequence[Cell]], str]] = {"md": _markdown, "tex": _latex, "html": _html}
