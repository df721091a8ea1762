"""``infssm run``, ``resume`` and ``sweep``."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infssm.cli import options as option
from infssm.cli.report import print_comparison
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from infssm.bench.executors import Experiment
    from infssm.bench.sweeps import Sweep
    from infssm.learner.result import Result


def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as train.epochs=10.")
    ] = None,
    preset: option.Preset = None,
    variant: option.Variant = "paper",
    config: option.Config = None,
    seed: option.Seeds = None,
    data_root: option.DataRoot = None,
    out: option.Out = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Repeat runs that are complete instead of showing them.")
    ] = False,
    print_config: option.PrintConfig = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load data, model and method, time a few steps, print the plan, and stop.")
    ] = False,
    fast_dev_run: Annotated[
        bool,
        typer.Option(
            "--fast-dev-run",
            help="Two steps per task, as a test. A preset runs a small model on generated images.",
        ),
    ] = False,
    jobs: option.Jobs = 1,
    ray: option.Ray = None,
    quiet: option.Quiet = False,
    imports: option.Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Train a method on a stream of tasks; without arguments, five methods side by side on digits.

    Examples:

    - `infssm run` — the main job: plain training, replay, held states and heads of class statistics on digits

    - `infssm run method=ewc method.weight=1e4` — one method on digits

    - `infssm run -p cifar100/5-task/inf-ssm --data-root ~/data --seed 0 10 100`

    - `infssm run -c my.yaml train.epochs=10 --print-config`

    - `infssm run method=seq,lwf-ac+lda train.lr=1e-3,1e-4 --seed 0 10 --jobs 2` — a grid of eight runs, two at once

    Values with commas between them make a grid: every choice is run with every seed. A list in brackets is one value,
    and so is text in quotes: `'data.tasks=[[0, 1], [2, 3]]'`. Task 0 is trained once for all runs that train it alike.
    Results do not depend on `--jobs`, `--ray` or the other runs of a grid.

    A run that was interrupted continues; a complete one is shown, not repeated.
    """
    from infssm.bench.executors import gather, make_plan, results
    from infssm.bench.presets import fast_dev_config, is_job, plan

    benchmark = preset if preset and is_job(preset) else None
    if benchmark and config:
        raise ConfigError("give a preset (-p) or a config file (-c), not both")
    source = option.source_of(None if benchmark else preset, variant, config)
    where = {"data_root": data_root, "out": out, "job": benchmark}
    todo = plan(source, overrides or (), seeds=seed or None, fast_dev_run=fast_dev_run, **where)
    if fast_dev_run and preset:
        # On generated images in the layout of their data sets.
        todo, overwrite = make_plan(fast_dev_config(j.config, Path(j.config.out) / "fast-dev") for j in todo), True
    if print_config or dry_run:
        _show(todo, dry_run=dry_run)
        return
    own = source is None and benchmark is None
    if own and not fast_dev_run and "RANK" not in os.environ:  # not once per process of torchrun
        _announce(todo, jobs, quiet=quiet)
    executor, begun = option.choose_executor(jobs, ray), time.monotonic()
    demo = own and len(todo) > 1 and not any(o.startswith("method") for o in overrides or ())
    ends = gather(executor, todo, overwrite=overwrite or (demo and _complete(todo)), quiet=quiet)
    if os.environ.get("RANK", "0") == "0":  # torchrun runs this on every process
        finished = [end.result for end in ends if end.result]
        _conclude(finished, time.monotonic() - begun)
        if demo and not fast_dev_run:
            _invite(finished)
    results(ends)  # raises if a run failed


def _complete(todo: list[Experiment]) -> bool:
    from infssm.learner.store.directory import RunDirectory

    return all(RunDirectory(job.path).complete for job in todo)


def _announce(todo: list[Experiment], jobs: int, *, quiet: bool) -> None:
    """Say what data other than the main job's will be trained with, and how long; stop where it does not fit."""
    from infssm.bench.timing import estimate

    config = todo[-1].config
    if config.data.name == "digits" or _complete(todo):
        return
    found = estimate(config)
    options = ", ".join(f"{key} {value}" for key, value in config.model.options.items())
    model = f"{config.model.name} ({options})" if options else config.model.name
    at_once = min(jobs, len(todo))
    if not found.fits(at_once):
        runs = f", {at_once} runs at once {at_once * found.memory / 2**30:.1f} GiB" if at_once > 1 else ""
        raise ConfigError(
            f"{model} on {config.data.name} would take {found.memory / 2**30:.1f} GiB of memory{runs}, more than there "
            "is: choose a smaller data.image_size, train.batch_size or model, or fewer --jobs"
        )
    if quiet:
        return
    samples, classes = (sum(task[n] for task in found.tasks) for n in (1, 0))
    runs = f", {len(todo)} runs" if len(todo) > 1 else ""
    what = f"{found.modality.word} of {classes} classes" if found.modality.augmented else found.modality.word
    pixels = f" at {config.data.image_size or 'their own'} pixels" if found.modality.augmented else ""
    typer.echo(
        f"{config.data.name}: {samples:,} training {what} in {len(found.tasks)} tasks\n"
        f"{model}{pixels}: about {found.duration}{runs and ' a run'} and "
        f"{found.memory / 2**30:.2f} GiB on this CPU{runs}\n"
        f"other choices: model=NAME {'data.image_size=PIXELS ' if pixels else ''}data.num_tasks=N train.epochs=N"
    )


def _show(todo: list[Experiment], *, dry_run: bool) -> None:
    from infssm.bench.timing import estimate
    from infssm.learner.config.load import to_yaml

    configs = [job.config for job in todo]
    if not dry_run or len(configs) == 1:
        typer.echo("---\n".join(map(to_yaml, configs)))
    if dry_run:
        for job in todo:
            found = estimate(job.config)
            start = f"\ntask 0 from {job.task0_weights}" if job.task0_weights else ""
            typer.echo(f"{found.title} -> {job.path}{start}\n{found}\n")


def _invite(results: list[Result]) -> None:
    """After the main job: the commands that teach what it trained something new, ready to be pasted."""
    import shlex
    import sys

    from infssm.bench.showcase import leave_learner

    if not results or results[0].config.data.name != "digits":
        return
    config = results[0].config
    left = leave_learner(results, Path(config.out).expanduser() / config.benchmark_name)
    if left is None:
        return
    learner, signs, image = (shlex.quote(str(path)) for path in left)
    program = shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "infssm" else "infssm"
    typer.echo(
        f"\nA learner with the digits of frozen+gda is in {learner}. Teach it a new class, the plus sign:\n"
        f"  {program} learn {learner} {signs}\n"
        f"and classify an image:\n"
        f"  {program} predict {learner} {image}"
    )


def _conclude(results: list[Result], seconds: float) -> None:
    from infssm.bench.reports import compare, write_comparison
    from infssm.learner.store.directory import RunDirectory

    if not results:
        return
    runs = [RunDirectory(result.path) for result in results]
    comparison = compare(runs)
    print_comparison(comparison)
    for line in comparison.left_out:
        typer.echo(line)
    folders = dict.fromkeys(Path(r.config.out).expanduser() / r.config.benchmark_name for r in results)
    for folder in folders:
        own = [run for run in runs if run.path.is_relative_to(folder)]
        page = write_comparison(own, folder)[1]
        report = results[0].report if len(results) == 1 else page
        typer.echo(f"report: {report}  ({seconds:.0f} s)")


def resume(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that do not change results, such as train.num_workers=4."
        ),
    ] = None,
    quiet: option.Quiet = False,
    imports: option.Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Continue an interrupted run, bit for bit.

    Example: `infssm resume runs/digits-5/ewc/vim_nano/seed0-3f2a90c1`
    """
    from infssm.bench.reports import compare
    from infssm.bench.running import resume as continue_run
    from infssm.learner.store.directory import RunDirectory

    result = continue_run(run, overrides or (), quiet=quiet)
    print_comparison(compare([RunDirectory(result.path)]))
    typer.echo(f"report: {result.report}")


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
    _conclude_sweep(sweep, [word for flag, value in begun.items() if value for word in (flag, value)])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"--time {shlex.quote(text)}: write 90s, 30m, 8h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _conclude_sweep(sweep: Sweep, start: list[str]) -> None:
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
    for number, outcome, settings in rows:
        table.add_row(number, outcome, escape(settings))
    Console().print(table)
    best = sweep.winners_command(start)
    if best is not None:
        typer.echo(f"best, on test data: {best}")
    typer.echo(f"report: {sweep.write_findings(best)}")
