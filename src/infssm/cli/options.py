"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infssm.errors import ConfigError

if TYPE_CHECKING:
    from infssm.bench.executors import Executor


def _import(paths: list[Path] | None) -> list[Path] | None:
    if paths:
        from infssm._user_code import import_files

        import_files(paths)
    return paths


Preset = Annotated[str | None, typer.Option("-p", "--preset", help="A preset: see `infssm list presets`.")]
Variant = Annotated[str, typer.Option(help="Follow the 'paper' or the 'authors-code' where they differ.")]
Config = Annotated[Path | None, typer.Option("-c", "--config", help="A YAML file of settings.")]
Seeds = Annotated[list[int] | None, typer.Option(help="Seeds to repeat every run with: --seed 0 10 100.")]
DataRoot = Annotated[str | None, typer.Option(help="Folder that holds the data sets.")]
Out = Annotated[str | None, typer.Option("-o", "--out", help="Folder for run directories.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the settings that would run, as YAML.")]
Jobs = Annotated[int, typer.Option("-j", "--jobs", min=1, help="Number of runs at once, each in its own process.")]
Ray = Annotated[
    str | None,
    typer.Option(metavar="auto|ADDRESS", help="Execute runs on a Ray cluster: this machine's, or at ADDRESS."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a learner or a run.")]
AfterTask = Annotated[
    int | None, typer.Option("--task", help="The model as it was after this task (0-based); the last one unless given.")
]
Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        callback=_import,
        is_eager=True,
        help="A Python file that registers methods, models, data sets or distances.",
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]


def source_of(preset: str | None, variant: str, config: Path | None) -> Any:
    """The values of a preset, or the config file; None if neither is given."""
    from infssm.bench.presets import load_preset

    if preset and config:
        raise ConfigError("give a preset (-p) or a config file (-c), not both")
    return load_preset(preset, variant).values if preset else config


def choose_executor(jobs: int, ray: str | None = None) -> Executor:
    """Where runs are carried out: here, in several processes of this machine, or on a Ray cluster."""
    from infssm.bench.executors import InProcess, LocalProcesses, RayExecutor

    if (jobs > 1 or ray) and "RANK" in os.environ:
        raise ConfigError("torchrun's processes work on one run together: leave out --jobs and --ray")
    if jobs > 1 and ray:
        raise ConfigError("give --jobs or --ray, not both: a cluster executes as many runs at once as it has cores")
    if ray:
        return RayExecutor(ray)
    return LocalProcesses(jobs) if jobs > 1 else InProcess()
