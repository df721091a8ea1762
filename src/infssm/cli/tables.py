"""Comparisons as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infssm.bench.reports.compare import Comparison
from infssm.bench.reports.rows import Row
from infssm.bench.reports.tables import best_cells, columns
from infssm.learner.metrics import ACCURACY


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print one table per benchmark, best values in bold, and below each what it shows."""
    console = console or Console()
    for benchmark, rows in comparison.benchmarks.items():
        best = best_cells(rows)
        # Narrow enough for the main job's table on 80 columns.
        table = Table(
            title=escape(benchmark), box=box.SIMPLE_HEAD, title_justify="left", collapse_padding=True, pad_edge=False
        )
        table.add_column("method", overflow="fold")  # names give way, numbers never
        table.add_column("seeds", justify="right")
        shown, measure = columns(rows), rows[0].measure
        for heading, _ in shown.values():
            table.add_column(heading, justify="right", no_wrap=True)
        spread = any(len(row.seeds) > 1 for row in rows)  # takes the place of the last digit
        digits = measure.digits - spread
        for i, row in enumerate(rows):
            cells = [_spelled(row.measures[key].format(scale=measure.scale, digits=digits), console) for key in shown]
            marked = [f"[bold]{cell}[/]" if (i, j) in best else cell for j, cell in enumerate(cells, start=2)]
            table.add_row(escape(row.label), str(len(row.seeds)), *marked)
        console.print(table)
        if measure != ACCURACY:
            console.print(_matrices(rows), highlight=False)
        for sentence in comparison.sentences(benchmark):
            console.print(sentence, highlight=False, markup=False)


def _spelled(cell: str, console: Console) -> str:
    """``+-`` on a terminal that has no ``±``."""
    try:
        cell.encode(console.encoding)
    except UnicodeEncodeError:
        return cell.replace("±", "+-")
    return cell


def _matrices(rows: Sequence[Row]) -> Table:
    """What every task is at after every task, method by method: the mean over seeds."""
    measure, names = rows[0].measure, rows[0].names_per_task
    table = Table(title=f"{measure.title} of each task", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("method", overflow="fold")
    table.add_column("after", overflow="fold")
    shown = [", ".join(name) for name in names] or [str(task) for task in range(rows[0].matrices[0].num_tasks)]
    for name in shown:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for row in rows:
        values = np.mean([matrix.all_values for matrix in row.matrices], axis=0)
        for step, line in enumerate(values):
            cells = [f"[bold]{measure.show(v)}[/]" if j == step else measure.show(v) for j, v in enumerate(line)]
            table.add_row(escape(row.label) if not step else "", escape(shown[step]), *cells)
    return table
