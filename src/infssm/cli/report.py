"""``infssm report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from infssm.learner.store.directory import RunDirectory


def command(
    paths: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
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
        bool, typer.Option("--paper", help="The paper's tables with what was measured, and commands for the rest.")
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

    Each run's own `report.html` is written again, too.
    """
    from infssm._files import write_text
    from infssm.bench.reports import FORMATS, compare, paired_tests, write_figures
    from infssm.bench.reports import report as one_run
    from infssm.bench.reports.tables import charts
    from infssm.cli.tables import print_comparison

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
