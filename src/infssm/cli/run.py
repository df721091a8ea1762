"""``infssm run``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from infssm.errors import ConfigError


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as train.epochs=10.")
    ] = None,
    preset: Annotated[str | None, typer.Option("-p", "--preset", help="A preset: see `infssm list presets`.")] = None,
    variant: Annotated[str, typer.Option(help="Follow the 'paper' or the 'authors-code' where they differ.")] = "paper",
    config: Annotated[Path | None, typer.Option("-c", "--config", help="A YAML file of settings.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds to repeat with: --seed 0 10 100.")] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder that holds the data sets.")] = None,
    out: Annotated[str | None, typer.Option("-o", "--out", help="Folder for run directories.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Repeat runs that are complete instead of showing them.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings that would run, as YAML.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load data, model and method, time a few steps, say what would run, stop.")
    ] = False,
    fast_dev_run: Annotated[
        bool,
        typer.Option(
            "--fast-dev-run",
            help="Two steps per task: does it work? A preset runs in miniature on pictures of its own.",
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
) -> None:
    """Train a method on a stream of tasks; without arguments, six methods side by side on digits.

    Examples:

    - `infssm run` — the main job: seq, lwf-ac, inf-ssm and inf-ssm-exact on five tasks of digits

    - `infssm run method=ewc method.weight=1e4` — one method on digits

    - `infssm run -p cifar100/5-task/inf-ssm --data-root ~/data --seed 0 10 100`

    - `infssm run -c my.yaml train.epochs=10 --print-config`

    A run that was interrupted continues; a complete one is shown, not repeated.
    """
    from infssm.presets import plan
    from infssm.train.side_by_side import run_side_by_side

    if preset and config:
        raise ConfigError("give a preset (-p) or a config file (-c), not both")
    source: Any = _preset(preset, variant) if preset else config
    groups = plan(source, overrides or (), seeds=seed or None, data_root=data_root, out=out, fast_dev_run=fast_dev_run)
    if fast_dev_run and preset:
        groups, overwrite = _miniatures(groups), True
    if print_config or dry_run:
        _show(groups, dry_run=dry_run)
        return
    if source is None and not fast_dev_run and "RANK" not in os.environ:  # not once per process of torchrun
        _announce([config for group in groups for config in group], quiet=quiet)
    begun = time.monotonic()
    demo = source is None and any(len(group) > 1 for group in groups)
    results = [r for group in groups for r in run_side_by_side(group, overwrite=overwrite or demo, quiet=quiet)]
    if os.environ.get("RANK", "0") == "0":  # torchrun runs this on every process
        _conclude(results, time.monotonic() - begun)


def _announce(configs: list[Any], *, quiet: bool) -> None:
    """Say what data other than the main job's will be trained with, and how long; stop where it does not fit."""
    from infssm.presets import estimate
    from infssm.runs import RunDirectory
    from infssm.train.running import run_path

    config = configs[-1]
    if config.data.name == "digits" or all(RunDirectory(run_path(c)).complete for c in configs):
        return
    found = estimate(config)
    options = ", ".join(f"{key} {value}" for key, value in config.model.options.items())
    model = f"{config.model.name} ({options})" if options else config.model.name
    if not found.fits:
        raise ConfigError(
            f"{model} on {config.data.name} would take {found.memory / 2**30:.1f} GiB of memory, more than there is: "
            "choose a smaller data.image_size, train.batch_size or model"
        )
    if quiet:
        return
    images, classes = (sum(task[n] for task in found.tasks) for n in (1, 0))
    runs = f", {len(configs)} runs" if len(configs) > 1 else ""
    typer.echo(
        f"{config.data.name}: {images:,} training images of {classes} classes in {len(found.tasks)} tasks\n"
        f"{model} at {config.data.image_size or 'their own'} pixels: about {found.duration}{runs and ' a run'} and "
        f"{found.memory / 2**30:.2f} GiB on this CPU{runs}\n"
        "other choices: model=NAME data.image_size=PIXELS data.num_tasks=N train.epochs=N"
    )


def _preset(name: str, variant: str) -> Any:
    from infssm.presets import load_preset

    return load_preset(name, variant).values


def _miniatures(groups: list[list[Any]]) -> list[list[Any]]:
    """The runs on generated pictures in the layout of their data sets, under ``<out>/fast-dev``."""
    from infssm.presets import fast_dev_config

    return [[fast_dev_config(config, Path(config.out) / "fast-dev") for config in group] for group in groups]


def _show(groups: list[list[Any]], *, dry_run: bool) -> None:
    from infssm.presets import describe, estimate
    from infssm.train import to_yaml

    configs = [config for group in groups for config in group]
    if not dry_run or len(configs) == 1:
        typer.echo("---\n".join(map(to_yaml, configs)))
    if dry_run:
        for config in configs:
            typer.echo(f"{describe(config)}\n{estimate(config)}\n")


def _conclude(results: list[Any], seconds: float) -> None:
    from rich.console import Console

    from infssm.cli.tables import print_comparison
    from infssm.train.side_by_side import write_comparison

    folder = Path(results[0].config.out).expanduser() / results[0].config.benchmark_name
    comparison, page = write_comparison(results, folder)
    console = Console()
    print_comparison(comparison, console)
    if verdict := comparison.verdict():
        console.print(verdict, highlight=False)
    report = results[0].report if len(results) == 1 else page
    console.print(f"report: {report}  ({seconds:.0f} s)", highlight=False, soft_wrap=True)
