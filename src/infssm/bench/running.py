"""`run` and `resume`: a run from its configuration to its result."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infssm.bench.reports.report import write_report
from infssm.data import Split
from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import config_hash, differences, load_config, merge, parse_overrides, to_dict, to_yaml
from infssm.learner.devices import launch
from infssm.learner.display import Display, choose_screen
from infssm.learner.log import Log
from infssm.learner.loop import Loop
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.result import Result
from infssm.learner.saving.checkpoint import load_newest, previous
from infssm.learner.saving.progress import Position, Progress, check_belongs, check_best, restore_progress
from infssm.learner.setup import Setup, build, check_data
from infssm.learner.signals import Signals
from infssm.learner.store import names
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.env import environment

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_PATIENCE = 30.0
"""Seconds until a folder that process 0 made must be seen by all: network file systems remember for a while."""


def run(config: RunConfig, *, overwrite: bool = False, quiet: bool = False, display: Display | None = None) -> Result:
    """Train and evaluate one method on one stream of tasks.

    The run directory follows from the configuration. A complete run there is returned as it is, an unfinished one is
    continued; ``overwrite`` starts over instead. ``display`` is shown the run where it has one process.
    """
    if config.train.devices > 1:  # it would have to go to other processes
        display = None
    return Result.load(launch(config.train, _work, config, run_path(config), overwrite, quiet, display))


def resume(path: str | os.PathLike[str], overrides: Iterable[str] = (), *, quiet: bool = False) -> Result:
    """Continue an interrupted run bit for bit; ``overrides`` may only touch what does not change its results."""
    directory = RunDirectory.open(path)
    directory.verify()
    stored = load_config(directory.config())
    config = load_config(merge(directory.config(), parse_overrides(overrides)))
    if config_hash(config) != config_hash(stored) or config.seed != stored.seed:
        changed = "; ".join(differences(to_dict(stored), to_dict(config)))
        raise ConfigError(f"a run cannot be resumed with another configuration ({changed}): start a new run instead")
    return Result.load(launch(config.train, _work, config, directory.path, False, quiet, None))


def run_path(config: RunConfig) -> Path:
    """Where the run of a configuration lives: ``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>``."""
    name = f"seed{config.seed}-{config_hash(config)}"
    model = config.model.name.rstrip("/").split("/")[-1]
    return Path(config.out).expanduser() / config.benchmark_name / config.method.name / model / name


def _work(fabric: Fabric, config: RunConfig, path: Path, overwrite: bool, quiet: bool, given: Display | None) -> Path:
    """The run, on each process."""
    display = given if given and fabric.world_size == 1 else choose_screen(quiet or not fabric.is_global_zero).open()
    run = RunDirectory(path)
    if fabric.broadcast(run.complete and not overwrite):
        check_data(config, Split.load(run.split_path))
        display.note(f"already complete: {path} (repeat it with --overwrite)")
        if fabric.is_global_zero and not run.report_path.exists():
            write_report(run)
        return path
    with _alone(fabric, run):
        _train(fabric, config, run, _open(fabric, run, config, overwrite=overwrite, display=display), display)
        fabric.barrier()
    return path


def _train(
    fabric: Fabric, config: RunConfig, run: RunDirectory, saved: dict[str, Any] | None, display: Display
) -> None:
    """From the checkpoint, or from the beginning, to the result."""
    _set_threads(config, saved)
    split = Split.load(run.split_path) if saved is not None else None
    setup = build(config, fabric.device, split, weights=saved is None)
    for warning in setup.method.warnings():
        display.note(f"warning: {warning}")
    if saved is None:
        progress = Progress(Position(), AccuracyMatrix(setup.stream.num_tasks, setup.measure))
        if fabric.is_global_zero:
            run.write_json(names.ENV, environment())
            run.write_json(names.STREAM, setup.stream.facts.to_json())
            setup.stream.split.save(run.split_path)
    else:
        check_belongs(saved, setup)
        progress = restore_progress(saved, setup)
        check_best(run, progress)
    log = _log(run, config, saved) if fabric.is_global_zero else None
    try:
        with Signals() as signals:
            display.start(f"{config.method.name} seed {config.seed}", _steps(setup), progress.position.at)
            Loop(fabric, setup, progress, run, log, display, signals).train()
    finally:
        display.stop()
        if log is not None:
            log.close()
    if fabric.is_global_zero:
        _finish(run, progress)


@contextlib.contextmanager
def _alone(fabric: Fabric, run: RunDirectory) -> Iterator[None]:
    """Keep other processes out of the directory; process 0 holds the lock for all of its run."""
    refusal: ConfigError | None = None
    with contextlib.ExitStack() as stack:
        if fabric.is_global_zero:
            try:
                run.check_usable()
                run.make()
                stack.enter_context(run.lock())
            except ConfigError as error:
                refusal = error
        refusal = fabric.broadcast(refusal)  # else the others would wait for a process that has left
        if refusal is not None:
            raise refusal
        _check_shared(fabric, run)
        yield


def _check_shared(fabric: Fabric, run: RunDirectory) -> None:
    """All processes read one folder, wherever they run; a network file system may take a moment to show it."""
    patience = time.monotonic() + _PATIENCE
    while not (seen := run.checkpoints.is_dir()) and time.monotonic() < patience:
        time.sleep(0.2)
    missing = fabric.world_size - int(
        fabric.all_reduce(torch.tensor(float(seen), device=fabric.device), reduce_op="sum").item()
    )
    if missing:
        raise ConfigError(
            f"{missing} of the {fabric.world_size} processes do not see {run.path}: the machines of one run need one "
            "folder that all of them read (--out on a shared file system); see docs/scale.md"
        )


def _open(
    fabric: Fabric, run: RunDirectory, config: RunConfig, *, overwrite: bool, display: Display
) -> dict[str, Any] | None:
    """Prepare the run directory; the checkpoint to continue from, if there is one."""
    last = run.last_checkpoint
    unfinished = not overwrite and (last.exists() or previous(last).exists())
    if not fabric.broadcast(unfinished):
        if fabric.is_global_zero:
            if not overwrite:
                _check_nothing_lost(run)
            RunDirectory.create(run.path, overwrite=True).write_text(names.CONFIG, to_yaml(config))
        fabric.barrier()
        return None
    if fabric.is_global_zero:
        run.adopt()
    saved, warning = load_newest(last)
    fabric.barrier()
    if warning and fabric.is_global_zero:
        display.note(f"warning: {warning}")
        if last.exists():
            with contextlib.suppress(OSError):  # kept for a look at it; the next save replaces it otherwise
                os.replace(last, last.with_name("last.ckpt.damaged"))
    return saved


def _check_nothing_lost(run: RunDirectory) -> None:
    """Raise where the run has models but no checkpoint: to start over would be to remove them."""
    if run.saved_tasks:
        kept = ", ".join(run.weights_path(task).name for task in run.saved_tasks)
        raise CheckpointError(
            f"{run.path} has lost its {run.last_checkpoint.name}, so the run cannot be continued; its models ({kept}) "
            f"are kept. Restore {run.last_checkpoint}, choose another --out, or start over with "
            "`infssm run ... --overwrite`, which removes them"
        )


def _log(run: RunDirectory, config: RunConfig, saved: Mapping[str, Any] | None) -> Log:
    """The log, cut back to where the checkpoint was written."""
    if saved is None:
        return Log(run, config)
    return Log(run, config, keep=saved["log"], digest=saved.get("log_digest"))


def _set_threads(config: RunConfig, saved: Mapping[str, Any] | None) -> None:
    """Sums over threads depend on their number: a resumed run keeps the one it had."""
    threads = saved["threads"] if saved else config.train.threads
    if threads is not None:
        torch.set_num_threads(threads)


def _steps(setup: Setup) -> int:
    """Steps of the whole run."""
    limit = setup.config.train.limit_batches
    total = 0
    for index in range(setup.stream.num_tasks):
        steps = len(setup.train_loader(setup.task(index), 0))
        total += setup.epochs(index) * min(steps, limit or steps)
    return total


def _finish(run: RunDirectory, progress: Progress) -> None:
    """Write the result, which marks the run as complete, and the report."""
    values = {name: None if value != value else value for name, value in progress.matrix.summary().items()}
    run.seal_metrics()
    run.write_json(names.RESULT, values | {"seconds": progress.position.seconds, "matrix": progress.matrix.to_json()})
    write_report(run)
