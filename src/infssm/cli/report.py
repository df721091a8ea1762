"""``infssm report`` and ``study``, and comparisons as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infssm.cli.options import DataRoot
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infssm.bench.reports.compare import Comparison
    from infssm.bench.reports.rows import Row
    from infssm.learner.store.directory import RunDirectory


def report(
    paths: Annotated[list[Path], typer.Argument(help="Run directories, or folders that contain some.")],
    form: Annotated[str, typer.Option("-f", "--format", help="md, csv, tex, html or json.")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every figure as PNG, SVG and PDF to this folder.")
    ] = None,
    paired: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Test the difference between two methods, seed by seed."),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's tables beside your results, with commands for missing ones.")
    ] = False,
) -> None:
    """Compare runs: mean and spread over seeds, one row per method.

    Examples:

    - `infssm report runs` — a table on the terminal

    - `infssm report runs/digits-5 -f tex -o table.tex`

    - `infssm report runs -f html -o comparison.html` — tables and plots in one file

    - `infssm report runs --figures figures` — every figure as PNG, SVG and PDF

    - `infssm report runs --paired inf-ssm-exact seq` — a paired t-test over seeds

    - `infssm report runs --paper -o paper.html` — beside the paper's numbers (md, tex or html)

    Each run's own `report.html` is also rewritten.
    """
    from infssm._files import write_text
    from infssm.bench.reports import FORMATS, compare, paired_tests, write_figures
    from infssm.bench.reports import report as one_run
    from infssm.bench.reports.tables import charts

    form = "json" if as_json else form or (output.suffix.removeprefix(".") if output else "")
    if paper:
        _beside_paper(paths, form or "md", output)
        return
    if form and form not in FORMATS:
        raise ConfigError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    runs = _readable(paths)
    comparison = compare(runs)
    for line in comparison.left_out:
        typer.echo(f"warning: {line}", err=True)
    if paired:
        comparison = replace(comparison, paired=tuple(paired_tests(comparison.rows, *paired)))
    if output is not None:
        write_text(output, FORMATS[form or "md"](comparison))
        typer.echo(f"wrote {output}")
    elif form:
        typer.echo(FORMATS[form](comparison), nl=False)
    else:
        print_comparison(comparison)
    if figures is not None:
        drawn = [chart for rows in comparison.benchmarks.values() for chart in charts(rows)]
        written = write_figures(drawn if len(runs) > 1 else one_run.charts(runs[0]), figures)
        typer.echo(f"wrote {len(written)} files to {figures}", err=True)


def _beside_paper(paths: list[Path], form: str, output: Path | None) -> None:
    from infssm._files import write_text
    from infssm.bench.presets import PAPER_FORMATS, compare_with_paper, coverage

    if form not in PAPER_FORMATS:
        raise ConfigError(f"--paper has no format {form!r}; known: {', '.join(PAPER_FORMATS)}")
    cells = compare_with_paper(_readable(paths))
    if output is None:
        typer.echo(PAPER_FORMATS[form](cells), nl=False)
        return
    write_text(output, PAPER_FORMATS[form](cells))
    typer.echo(f"{coverage(cells)} wrote {output}")


def _readable(paths: list[Path]) -> list[RunDirectory]:
    """Complete runs, their own reports written again; runs that are left out are named on stderr."""
    from infssm.bench.reports.report import write_reports
    from infssm.learner.store.directory import find_runs

    runs, problems = write_reports(find_runs(paths, complete=False))
    if not runs and problems:
        raise DataError("; ".join(problems))
    for problem in problems:
        typer.echo(f"warning: {problem}", err=True)
    return runs


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print one table per benchmark, best values in bold, and below each what it shows."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from infssm.bench.reports.metrics import columns
    from infssm.bench.reports.tables import best_cells
    from infssm.learner.metrics import ACCURACY

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
            cells = [_spelled(row.metrics[key].format(scale=measure.scale, digits=digits), console) for key in shown]
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
    import numpy as np
    from rich import box
    from rich.markup import escape
    from rich.table import Table

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


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all are listed.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the study, such as images=64.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Directory of the run to study.")] = None,
    data_root: DataRoot = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the numbers, the figure and the text.")] = Path(
        "studies"
    ),
) -> None:
    """Run one of the paper's analyses: print its result and write NAME.json, NAME.png and NAME.md.

    Examples:

    - `infssm study` — the list of studies

    - `infssm study monte-carlo noise=variance`

    - `infssm study drift --run runs/digits-5/seq/vim_nano/seed0-1a2b3c4d kinds=all`
    """
    from infssm.bench.studies import describe_study, list_studies, run_study
    from infssm.learner.config.load import parse_overrides

    if name is None:
        width = max(map(len, list_studies()))
        for study in list_studies():
            typer.echo(f"{study:<{width}}  {describe_study(study)}")
        return
    chosen: dict[str, Any] = {}
    for option in options or []:
        # Below the study's name, because `model=...` would be read as a section of a run's configuration.
        chosen |= parse_overrides([f"{name}.{option}"])[name]
    if run is not None:
        chosen["run"] = run
    if data_root is not None:
        chosen["data_root"] = data_root
    outcome = run_study(name, **chosen)
    typer.echo(outcome.text)
    typer.echo(f"figure: {outcome.save(out)}")
