"""What a search found: a table, a figure of the objective against each setting, and the winner's command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infssm._files import atomic_file, write_text
from infssm.bench.sweeps.space import Choice, Range
from infssm.bench.sweeps.sweep import Sweep
from infssm.bench.sweeps.trials import Trial
from infssm.learner.metrics import ACCURACY, Measure


class Row(NamedTuple):
    """A trial: its number, its objective on validation data or what became of it, and its settings."""

    number: int
    outcome: str
    settings: tuple[str, ...]


def rows(sweep: Sweep, trials: Sequence[Trial]) -> list[Row]:
    """Complete trials, best first, then the others."""
    measure = sweep.measure

    def outcome(trial: Trial) -> str:
        if trial.state == "complete":
            return measure.show(trial.value or 0)
        if trial.state == "running":
            return "unfinished"
        if trial.error is not None:
            return "diverged"
        last = max(trial.reports)
        return f"stopped at {measure.show(trial.reports[last])} after step {last + 1}"

    ordered = sorted(trials, key=lambda t: (t.state != "complete", -measure.sign * (t.value or 0), t.number))
    return [Row(trial.number, outcome(trial), tuple(sweep.settings(trial))) for trial in ordered]


def objective(measure: Measure) -> str:
    """The name of the objective in tables: ``AA``, or the measure's own for language."""
    return "AA" if measure == ACCURACY else measure.title


def winners_command(sweep: Sweep, start: Sequence[str]) -> str | None:
    """The command that runs the winner on test data; ``start``: the options that say what the search began with."""
    best = sweep.best()
    if best is None:
        return None
    seeds = ["--seed", *map(str, sweep.seeds)]
    return shlex.join(["infssm", "run", *start, *sweep.fixed, *sweep.settings(best), *seeds])


def write_findings(sweep: Sweep, trials: Sequence[Trial], command: str | None) -> Path:
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
        _figure(sweep, trials).savefig(file, format="png", dpi=120)
    return path


def _figure(sweep: Sweep, trials: Sequence[Trial]) -> Any:
    """The objective against each setting, a panel each; the best is marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(sweep.space), 3), layout="constrained")
    panels: Any = figure.subplots(1, len(sweep.space), sharey=True, squeeze=False)[0]
    best, measure = sweep.best(), sweep.measure
    for panel, (key, dimension) in zip(panels, sweep.space.items(), strict=True):
        for trial in trials:
            if trial.value is not None:
                place = trial.params[key]
                x = dimension.values.index(place) if isinstance(dimension, Choice) else place
                style = {"color": "tab:red", "zorder": 3} if trial == best else {"color": "tab:blue", "alpha": 0.6}
                panel.plot([x], [measure.scale * trial.value], "o", **style)
        if isinstance(dimension, Range) and dimension.log:
            panel.set_xscale("log")
        if isinstance(dimension, Choice):
            panel.set_xticks(range(len(dimension.values)), dimension.values, rotation=30)
        panel.set_xlabel(key)
    panels[0].set_ylabel(f"{objective(measure)} on validation data, {measure.unit}")
    return figure
