"""``infssm resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infssm.cli.importing import Import
from infssm.cli.options import Quiet


def command(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Only what does not change results, such as train.num_workers=4."
        ),
    ] = None,
    quiet: Quiet = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Continue an interrupted run, bit for bit.

    Example: `infssm resume runs/digits-5/ewc/vim_nano/seed0-3f2a90c1`
    """
    from infssm.bench.reports import compare
    from infssm.bench.running import resume
    from infssm.cli.tables import print_comparison
    from infssm.learner.store.directory import RunDirectory

    result = resume(run, overrides or (), quiet=quiet)
    print_comparison(compare([RunDirectory(result.path)]))
    typer.echo(f"report: {result.report}")
