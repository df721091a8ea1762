"""What a search found: a table, a figure of the objective against each setting, and the winner's command."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from infssm._files import atomic_file, write_text
from infssm.bench.sweeps.space import Choice, Range
from infssm.bench.sweeps.sweep import Sweep
from infssm.learner.metrics import ACCURACY, Measure

if TYPE_CHECKING:
    from pathlib import Path

    from optuna.trial import FrozenTrial


class Row(NamedTuple):
    """A trial: its number, its objective on validation data or what became of it, and its settings."""

    number: int
    outcome: str
    settings: tuple[str, ...]


def rows(sweep: Sweep, trials: Sequence[FrozenTrial]) -> list[Row]:
    """Complete trials, best first, then the others."""
    measure = sweep.measure
    ordered = sorted(
        trials, key=lambda trial: (trial.state.name != "COMPLETE", -measure.sign * (trial.value or 0), trial.number)
    )
    return [Row(trial.number, _outcome(trial, measure), tuple(sweep.settings(trial))) for trial in ordered]


def objective(measure: Measure) -> str:
    """The name of the objective in tables: ``AA``, or the measure's own for language."""
    return "AA" if measure == ACCURACY else measure.title


def _outcome(trial: FrozenTrial, measure: Measure) -> str:
    if trial.state.name == "COMPLETE":
        return measure.show(trial.value or 0)
    if trial.state.name != "PRUNED":
        return "unfinished"
    if "error" in trial.user_attrs:
        return "diverged"
    last = max(trial.intermediate_values)
    return f"stopped at {measure.show(trial.intermediate_values[last])} after step {last}"


def winners_command(sweep: Sweep, start: Sequence[str]) -> str | None:
    """The command that runs the winner on test data; ``start``: the options that say what the search began with."""
    best = sweep.best()
    if best is None:
        return None
    seeds = ["--seed", *map(str, sweep.seeds)]
    return shlex.join(["infssm", "run", *start, *sweep.fixed, *sweep.settings(best), *seeds])


def write_findings(sweep: Sweep, trials: Sequence[FrozenTrial], command: str | None) -> Path:
    """Write ``sweep.md`` and ``sweep.png`` into the folder of the search; the path of the first."""
    name = objective(sweep.measure)
    lines = [
        "# Search",
        "",
        f"{len(trials)} trials; {name} in {sweep.measure.unit} on validation data, mean over seeds {sweep.seeds}.",
    ]
    if command is not None:
        lines += ["", "Best, to be run on test data:", "", f"    {command}"]
    lines += ["", f"![{name} against each setting](sweep.png)", "", f"| trial | {name} | settings |", "|---|---|---|"]
    lines += [f"| {row.number} | {row.outcome} | `{' '.join(row.settings)}` |" for row in rows(sweep, trials)]
    path = sweep.folder / "sweep.md"
    write_text(path, "\n".join(lines) + "\n")
    with atomic_file(sweep.folder / "sweep.png") as file:
        file.write(draw(sweep, trials))
    return path


def draw(sweep: Sweep, trials: Sequence[FrozenTrial]) -> bytes:
    """The objective against each setting, a panel each, as PNG; the best is marked."""
    from matplotlib.figure import Figure

    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    figure = Figure(figsize=(3.2 * len(sweep.space), 3), layout="constrained")
    panels: Any = figure.subplots(1, len(sweep.space), sharey=True, squeeze=False)[0]
    best, measure = sweep.best(), sweep.measure
    for panel, (key, dimension) in zip(panels, sweep.space.items(), strict=True):
        for trial in complete:
            mark = (
                {"color": "tab:red", "zorder": 3}
                if best and trial.number == best.number
                else {"color": "tab:blue", "alpha": 0.6}
            )
            panel.plot([_place(dimension, trial.params[key])], [measure.scale * (trial.value or 0)], "o", **mark)
        if isinstance(dimension, Range) and dimension.log:
            panel.set_xscale("log")
        if isinstance(dimension, Choice):
            panel.set_xticks(range(len(dimension.values)), dimension.values, rotation=30)
        panel.set_xlabel(key)
    panels[0].set_ylabel(f"{objective(measure)} on validation data, {measure.unit}")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _place(dimension: Range | Choice, value: Any) -> float:
    return float(dimension.values.index(value)) if isinstance(dimension, Choice) else float(value)
