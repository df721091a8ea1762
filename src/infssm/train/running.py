"""`run` and `resume`: a run from its configuration to its result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infssm.data import Split
from infssm.errors import ConfigError
from infssm.metrics import AccuracyMatrix
from infssm.runs import RunDirectory, environment, write_report
from infssm.train._load import config_hash, differences, load_config, merge, parse_overrides, to_dict, to_yaml
from infssm.train.checkpoint import load_newest
from infssm.train.config import RunConfig
from infssm.train.devices import launch
from infssm.train.display import Display, choose_display
from infssm.train.log import Log
from infssm.train.loop import Loop
from infssm.train.result import Result
from infssm.train.setup import Setup, build, check_config
from infssm.train.signals import Signals
from infssm.train.state import Position, State, check_belongs, restore_state

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def run(config: RunConfig, *, overwrite: bool = False, quiet: bool = False) -> Result:
    """Train and evaluate one method on one stream of tasks.

    The run directory follows from the configuration. A complete run there is returned as it is, an unfinished one is
    continued; ``overwrite`` starts over instead.
    """
    check_config(config)
    return Result.load(launch(config.train, _work, config, run_path(config), overwrite, quiet))


def resume(path: str | os.PathLike[str], overrides: Iterable[str] = (), *, quiet: bool = False) -> Result:
    """Continue an interrupted run bit for bit; ``overrides`` may only touch what does not change its results."""
    directory = RunDirectory.open(path)
    stored = load_config(directory.config())
    config = load_config(merge(directory.config(), parse_overrides(overrides)))
    if config_hash(config) != config_hash(stored) or config.seed != stored.seed:
        changed = "; ".join(differences(to_dict(stored), to_dict(config)))
        raise ConfigError(f"a run cannot be resumed with another configuration ({changed}): start a new run instead")
    return Result.load(launch(config.train, _work, config, directory.path, False, quiet))


def run_path(config: RunConfig) -> Path:
    """Where the run of a configuration lives: ``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>``."""
    name = f"seed{config.seed}-{config_hash(config)}"
    return Path(config.out).expanduser() / config.benchmark_name / config.method.name / config.model.name / name


def _work(fabric: Fabric, config: RunConfig, path: Path, overwrite: bool, quiet: bool) -> Path:
    """The run, on each process."""
    display = choose_display(quiet or not fabric.is_global_zero)
    if fabric.broadcast(RunDirectory(path).complete and not overwrite):
        display.note(f"already complete: {path} (repeat it with --overwrite)")
        return path
    saved, run = _open(fabric, path, config, overwrite=overwrite, display=display)
    _set_threads(config, saved)
    split = Split.load(run.split_path) if saved is not None else None
    setup = build(config, fabric.device, split, weights=saved is None)
    if saved is None:
        state = State(Position(), AccuracyMatrix(setup.stream.num_tasks))
        if fabric.is_global_zero:
            run.write_json("env.json", environment())
            setup.stream.split.save(run.split_path)
    else:
        check_belongs(saved, setup)
        state = restore_state(saved, setup)
    log = Log(run, config, keep=saved["log"] if saved else 0) if fabric.is_global_zero else None
    try:
        with Signals() as signals:
            display.start(f"{config.method.name} seed {config.seed}", _steps(setup), state.position.at)
            Loop(fabric, setup, state, run, log, display, signals).train()
    finally:
        display.stop()
        if log is not None:
            log.close()
    if fabric.is_global_zero:
        _finish(run, state)
    fabric.barrier()
    return path


def _open(
    fabric: Fabric, path: Path, config: RunConfig, *, overwrite: bool, display: Display
) -> tuple[dict[str, Any] | None, RunDirectory]:
    """The run directory, and the checkpoint to continue from, if there is one."""
    last = path / "checkpoints" / "last.ckpt"
    unfinished = not overwrite and (last.exists() or last.with_name("last.ckpt.previous").exists())
    if not fabric.broadcast(unfinished):
        if fabric.is_global_zero:
            RunDirectory.create(path, overwrite=True).write_text("config.yaml", to_yaml(config))
        fabric.barrier()
        return None, RunDirectory(path)
    saved, warning = load_newest(last)
    fabric.barrier()
    if warning and fabric.is_global_zero:
        display.note(f"warning: {warning}")
        if last.exists():
            os.replace(last, last.with_name("last.ckpt.damaged"))
    return saved, RunDirectory.open(path)


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


def _finish(run: RunDirectory, state: State) -> None:
    """Write the result, which marks the run as complete, and the report."""
    values = {name: None if value != value else value for name, value in state.matrix.summary().items()}
    run.write_json("result.json", values | {"seconds": state.position.seconds, "matrix": state.matrix.to_json()})
    write_report(run)
