"""``infssm study``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all are listed.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the study, such as images=64.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Directory of the run to study.")] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder that holds the data sets, if they moved.")] = None,
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
