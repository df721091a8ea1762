"""Comparisons as terminal tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infssm.runs import Comparison
from infssm.runs.tables import COLUMNS, best_cells


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print one table per benchmark, best values in bold."""
    console = console or Console()
    for benchmark in comparison.benchmarks:
        rows = comparison.of(benchmark)
        best = best_cells(rows)
        table = Table(title=benchmark, box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("method", overflow="fold")  # names give way, numbers never
        table.add_column("seeds", justify="right")
        for heading, _ in COLUMNS.values():
            table.add_column(heading, justify="right", no_wrap=True)
        digits = 1 if any(len(row.seeds) > 1 for row in rows) else 2  # a spread takes the place of the second digit
        for i, row in enumerate(rows):
            cells = [row.measures[measure].format(digits=digits) for measure in COLUMNS]
            marked = [f"[bold]{cell}[/]" if (i, j) in best else cell for j, cell in enumerate(cells, start=2)]
            table.add_row(escape(row.label), str(len(row.seeds)), *marked)
        console.print(table)
