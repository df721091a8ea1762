"""``infssm report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infssm.errors import ConfigError


def command(
    paths: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    form: Annotated[str, typer.Option("-f", "--format", help="md, csv, tex, html or json.")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Compare runs: mean and spread over seeds, one row per method.

    Examples:

    - `infssm report runs` — a table on the terminal

    - `infssm report runs/digits-5 -f tex -o table.tex`

    - `infssm report runs -f html -o comparison.html` — tables and plots in one file

    Each run's own `report.html` is written again, too.
    """
    from infssm.cli.tables import print_comparison
    from infssm.runs import FORMATS, compare, find_runs, render, write_report

    form = "json" if as_json else form or (output.suffix.removeprefix(".") if output else "")
    if form and form not in FORMATS:
        raise ConfigError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    runs = find_runs(paths)
    comparison = compare(runs)
    for run in runs:
        write_report(run)
    if output is not None:
        output.write_text(render(comparison, form or "md"), encoding="utf-8")
        typer.echo(f"wrote {output}")
    elif form:
        typer.echo(render(comparison, form), nl=False)
    else:
        print_comparison(comparison)
        typer.echo(comparison.verdict())
