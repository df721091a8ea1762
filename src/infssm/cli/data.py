"""``infssm data fetch`` and ``infssm data check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infssm.errors import DataError

app = typer.Typer(help="Get data sets, and check those that are there.", no_args_is_help=True)

_Root = Annotated[str | None, typer.Option("--data-root", help="Folder that holds the data sets.")]


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="See `infssm list datasets`.")], data_root: _Root = None
) -> None:
    """Download and unpack a data set; an interrupted download continues.

    Example: `infssm data fetch cifar100 --data-root ~/data`
    """
    from infssm.data import fetch

    for path in fetch(name, data_root):
        typer.echo(f"ready: {path}")


@app.command("check")
def check_command(name: Annotated[str, typer.Argument(help="A data set, or a path.")], data_root: _Root = None) -> None:
    """Count classes and images, find files that cannot be read, say what is missing and where it was sought."""
    from infssm.data import check

    report = check(name, data_root, progress=_show_progress if sys.stderr.isatty() else None)
    place = "" if Path(name).exists() else f" under {report.root}"
    typer.echo(f"{name}{place}: {report.classes} classes, {report.images} images")
    for path, reason in report.unreadable:
        typer.echo(f"unreadable: {path}: {reason}")
    if not report.ok:
        raise DataError("; ".join(report.problems))


def _show_progress(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        typer.echo(f"\rread {done:,} of {total:,} files", nl=done == total, err=True)
