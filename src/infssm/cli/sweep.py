"""``infssm sweep``."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from infssm.cli import options as option
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from infssm.bench.sweeps import Sweep

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, fixed or to search: method.weight=log:1e-2..1e6."),
    ] = None,
    preset: option.Preset = None,
    variant: option.Variant = "paper",
    config: option.Config = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Trials in all; 20 without --time.")] = None,
    limit: Annotated[str | None, typer.Option("--time", help="Begin no trial after this long: 90s, 30m, 8h.")] = None,
    seed: option.Seeds = None,
    search_seed: Annotated[int, typer.Option("--search-seed", help="Seed of the search itself.")] = 0,
    jobs: option.Jobs = 1,
    ray: option.Ray = None,
    data_root: option.DataRoot = None,
    out: option.Out = None,
    print_config: option.PrintConfig = False,
    quiet: option.Quiet = False,
    imports: option.Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Search for the settings with the best average accuracy (AA) on validation images; test images are not read.

    Language models are searched for the fewest bits per byte or token.

    Examples:

    - `infssm sweep method=inf-ssm-exact method.weight=log:1e-2..1e6 train.lr=log:1e-4..1e-2 --trials 20`

    - `infssm sweep -c my.yaml model.options.depth=int:1..8 data.recipe=light,none --time 8h --seed 0 10 --jobs 2`

    The same command continues an interrupted search without loss. The same command on other machines,
    with the same --out on a shared file system, joins it. It ends with a table, a figure and the best trial's command.
    """
    from infssm.bench.sweeps import Sweep
    from infssm.learner.config.load import to_yaml

    source = option.source_of(preset, variant, config)
    executor = option.choose_executor(jobs, ray)
    seconds = None if limit is None else _seconds(limit)
    sweep = Sweep(
        source, overrides or (), seeds=seed or [0], search_seed=search_seed, out=out or "runs", data_root=data_root
    )
    if print_config:
        typer.echo("---\n".join(to_yaml(job.config) for job in sweep.first_trial()))
        return
    if not quiet:
        typer.echo(f"search in {sweep.folder}", err=True)
    sweep.run(executor, trials=trials or (None if seconds else 20), seconds=seconds, quiet=quiet)
    begun = {"-p": preset, "--variant": variant if preset and variant != "paper" else None}
    begun |= {"-c": str(config) if config else None, "--data-root": data_root}
    _conclude(sweep, [word for flag, value in begun.items() if value for word in (flag, value)])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"--time {shlex.quote(text)}: write 90s, 30m, 8h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _conclude(sweep: Sweep, start: list[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    name, rows = sweep.objective, sweep.rows()
    title = f"{len(rows)} trials, {name} on validation data, {sweep.measure.unit}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for row in rows:
        table.add_row(str(row.number), row.outcome, escape(" ".join(row.settings)))
    Console().print(table)
    best = sweep.winners_command(start)
    if best is not None:
        typer.echo(f"best, on test data: {best}")
    typer.echo(f"report: {sweep.write_findings(best)}")
