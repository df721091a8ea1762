"""`run` and `resume`: a run from its configuration to its result."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infssm._machine import num_threads
from infssm.bench.experiment import Experiment
from infssm.bench.reports.report import write_report
from infssm.data import Split, TaskStream
from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import config_hash, differences, load_config, merge, parse_overrides, to_dict, to_yaml
from infssm.learner.devices import environment, launch
from infssm.learner.events import (
    Control,
    Interrupted,
    Listener,
    Note,
    RunBegan,
    RunEnded,
    choose_screen,
    stop_on_signals,
)
from infssm.learner.log import Log
from infssm.learner.loop import Loop
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.result import Result
from infssm.learner.saving import Position, Progress, check_belongs, check_best, load_newest, previous, restore_progress
from infssm.learner.setup import Setup, build, check_data, load_stream
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.layout import InUseError
from infssm.methods import check_suits

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_MOMENT = 0.2
"""Seconds between two attempts to take a lock."""
_PATIENCE = 30.0
"""Seconds until a folder that process 0 made must be seen by all: network file systems remember for a while."""


def run(
    config: RunConfig | Experiment,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    listen: Listener | None = None,
    control: Control | None = None,
) -> Result:
    """Train and evaluate one method on one stream of tasks.

    The run directory follows from the configuration. A complete run there is returned as it is, an unfinished one is
    continued; ``overwrite`` starts over instead (the task-0 model that it shares with others is kept, see
    :func:`forget_task0`). ``listen`` is called with the events of the run, in the place
    of a display, and ``control`` can stop it; both need a run of one process.
    """
    experiment = Experiment.of(config)
    train = experiment.config.train
    if train.devices > 1:  # it would have to go to other processes
        listen = control = None
    return Result.load(
        launch(train, _work, experiment.config, experiment.label, experiment.path, overwrite, quiet, listen, control)
    )


def resume(path: str | os.PathLike[str], overrides: Iterable[str] = (), *, quiet: bool = False) -> Result:
    """Continue an interrupted run bit for bit; ``overrides`` may only touch what does not change its results."""
    directory = RunDirectory.open(path)
    if directory.path.resolve().parent.name == layout.TASK0:
        raise ConfigError(f"{path} is the task-0 model of other runs: resume one of them to continue it")
    directory.verify()
    stored = load_config(directory.config())
    config = load_config(merge(directory.config(), parse_overrides(overrides)))
    if config_hash(config) != config_hash(stored) or config.seed != stored.seed:
        changed = "; ".join(differences(to_dict(stored), to_dict(config)))
        raise ConfigError(f"a run cannot be resumed with another configuration ({changed}): start a new run instead")
    return Result.load(launch(config.train, _work, config, "", directory.path, False, quiet, None, None))


def run_path(config: RunConfig) -> Path:
    """Where the run of a configuration is: ``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>``."""
    return Experiment.of(config).path


def forget_task0(experiment: Experiment) -> None:
    """Remove the shared task-0 model that an experiment starts from, unless a process works on it."""
    if experiment.task0 is not None and (run := RunDirectory(experiment.task0.path)).is_run:
        with contextlib.suppress(InUseError), run.lock():
            RunDirectory.create(run.path, overwrite=True)


def _work(
    fabric: Fabric,
    config: RunConfig,
    label: str,
    path: Path,
    overwrite: bool,
    quiet: bool,
    listen: Listener | None,
    control: Control | None,
) -> Path:
    """The run, on each process. Fabric refuses frozen dataclasses as arguments of processes that it starts."""
    experiment, run = Experiment(config, label), RunDirectory(path)
    if listen is None or fabric.world_size > 1:
        listen = choose_screen(quiet or not fabric.is_global_zero).open()
    if fabric.broadcast(run.complete and not overwrite):
        check_data(config, Split.load(run.split_path))
        listen(Note(f"already complete: {path} (repeat it with --overwrite)"))
        if fabric.is_global_zero and not run.report_path.exists():
            write_report(run)
        return path
    with num_threads(config.train.threads), _alone(fabric, run):
        saved = _open(fabric, run, config, overwrite=overwrite, listen=listen)
        _train(fabric, experiment, run, saved, listen, control or Control())
        fabric.barrier()
    return path


def _train(
    fabric: Fabric,
    experiment: Experiment,
    run: RunDirectory,
    saved: dict[str, Any] | None,
    listen: Listener,
    control: Control,
    stream: TaskStream | None = None,
) -> None:
    """Train from the checkpoint, or from the beginning, to the result."""
    config = experiment.config
    if stream is None:
        stream = load_stream(config, Split.load(run.split_path) if saved is not None else None)
    # Before task 0 is trained, which other methods may share.
    check_suits(config.method.name, stream.facts.modality.name, domains=bool(stream.facts.domains))
    first = None if saved is not None else _ensure_task0(fabric, experiment, run, stream, listen, control)
    setup = build(
        config,
        fabric.device,
        stream=stream,
        task=0 if saved is None else Position(**saved["position"]).known_task,
        weights=saved is None,
        task0=None if first is None else first.weights_path(0),
    )
    for warning in filter(None, (setup.stream.warning, *setup.method.warnings())):
        listen(Note(f"warning: {warning}"))
    if saved is None:
        progress = Progress(Position(), AccuracyMatrix(setup.stream.num_tasks, setup.quantity))
        if fabric.is_global_zero:
            run.write_json(layout.ENV, environment())
            run.write_json(layout.STREAM, setup.stream.facts.to_json())
            setup.stream.split.save(run.split_path)
    else:
        check_belongs(saved, setup)
        progress = restore_progress(saved, setup)
        check_best(run, progress)
    log = None
    if fabric.is_global_zero:  # the log is cut back to where the checkpoint was written
        log = Log(run, config, keep=saved["log"], digest=saved["log_digest"]) if saved is not None else Log(run, config)
    try:
        with stop_on_signals(control):
            if first is not None:  # its steps, its time and its lines in the log count as the run's own
                lines = first.metrics()
                progress.position.at = max((line["at"] for line in lines), default=0)
                progress.position.seconds = sum(line.get("seconds", 0.0) for line in lines if line["kind"] == "epoch")
                if log is not None:
                    for line in lines:
                        log.write(line)
            steps = _steps(setup, 1 if experiment.task0_only else None)
            listen(RunBegan(experiment.name, steps, progress.position.at))
            loop = Loop(fabric, setup, progress, run, log, listen, control)
            if experiment.task0_only:
                loop.train_task0()
            else:
                loop.train()
    finally:
        listen(RunEnded())
        if log is not None:
            log.close()
    if fabric.is_global_zero and not experiment.task0_only:
        metrics = progress.matrix.summary()
        values: dict[str, Any] = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        values |= {"seconds": progress.position.seconds, "matrix": progress.matrix.to_json()}
        run.seal_metrics()
        run.write_json(layout.RESULT, values)  # which marks the run as complete
        write_report(run)


def _ensure_task0(
    fabric: Fabric,
    experiment: Experiment,
    run: RunDirectory,
    stream: TaskStream,
    listen: Listener,
    control: Control,
) -> RunDirectory | None:
    """The folder of the task-0 model that an experiment starts from, trained now where it is not there.

    One process trains it, the others wait; one that is killed leaves a checkpoint, from which the next continues.
    """
    if experiment.task0 is None:
        return None
    first = RunDirectory(experiment.task0.path)
    if not fabric.broadcast(_is_made(first, stream)):
        try:
            with _alone(fabric, first, wait=(listen, control)):
                if not fabric.broadcast(_is_made(first, stream)):  # another process may have made it meanwhile
                    config, other = experiment.task0.config, _has_other_data(first, stream)
                    saved = _open(fabric, first, config, overwrite=fabric.broadcast(other), listen=listen)
                    _train(fabric, experiment.task0, first, saved, listen, control, stream)
                    if fabric.is_global_zero:
                        first.drop_checkpoints()
        except Interrupted:
            raise Interrupted(f"interrupted and saved; continue with: infssm resume {run.path}") from None
    return first


def _is_made(first: RunDirectory, stream: TaskStream) -> bool:
    return first.weights_path(0).is_file() and not _has_other_data(first, stream)


def _has_other_data(first: RunDirectory, stream: TaskStream) -> bool:
    """Whether a task-0 model was trained on other data than those that are there now."""
    return first.split_path.is_file() and Split.load(first.split_path).hash != stream.split.hash


@contextlib.contextmanager
def _alone(fabric: Fabric, run: RunDirectory, *, wait: tuple[Listener, Control] | None = None) -> Iterator[None]:
    """Keep other processes out of the directory; process 0 holds the lock for all of its run.

    If another process works there, that is an error, unless ``wait`` is given: then its listener is notified and the
    lock is waited for until its control asks to stop.
    """
    refusal: ConfigError | Interrupted | None = None
    with contextlib.ExitStack() as stack:
        if fabric.is_global_zero:
            try:
                run.check_usable()
                run.make()
                if wait is None:
                    stack.enter_context(run.lock())
                else:
                    _lock_patiently(run, stack, *wait)
            except (ConfigError, Interrupted) as error:
                refusal = error
        refusal = fabric.broadcast(refusal)  # else the others would wait for a process that has left
        if refusal is not None:
            raise refusal
        _check_shared(fabric, run)
        yield


def _lock_patiently(run: RunDirectory, stack: contextlib.ExitStack, listen: Listener, control: Control) -> None:
    told = False
    with stop_on_signals(control):
        while True:
            try:
                stack.enter_context(run.lock())
                return
            except InUseError:  # noqa: PERF203
                if control.stopping:
                    raise Interrupted("interrupted") from None
                if not told:
                    listen(Note(f"waiting for the task-0 model that another process trains in {run.path}"))
                    told = True
                time.sleep(_MOMENT)


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
            "folder that all of them read (--out on a shared file system); see docs/guide/scale.md"
        )


def _open(
    fabric: Fabric, run: RunDirectory, config: RunConfig, *, overwrite: bool, listen: Listener
) -> dict[str, Any] | None:
    """Prepare the run directory; the checkpoint to continue from, if there is one."""
    last = run.last_checkpoint
    unfinished = not overwrite and (last.exists() or previous(last).exists())
    if not fabric.broadcast(unfinished):
        if fabric.is_global_zero:
            if run.saved_tasks and not overwrite:
                kept = ", ".join(run.weights_path(task).name for task in run.saved_tasks)
                raise CheckpointError(
                    f"{run.path} has lost its {last.name}, so the run cannot be continued; its models ({kept}) are "
                    f"kept. Restore {last}, choose another --out, or start over with `infssm run ... --overwrite`, "
                    "which removes them"
                )
            RunDirectory.create(run.path, overwrite=True).write_text(layout.CONFIG, to_yaml(config))
        fabric.barrier()
        return None
    if fabric.is_global_zero:
        run.adopt()
    saved, warning = load_newest(last)
    fabric.barrier()
    if warning and fabric.is_global_zero:
        listen(Note(f"warning: {warning}"))
        if last.exists():
            with contextlib.suppress(OSError):  # kept for inspection; the next save would replace it
                os.replace(last, last.with_name("last.ckpt.damaged"))
    return saved


def _steps(setup: Setup, tasks: int | None = None) -> int:
    """Steps of the whole run, those of a shared task-0 model included."""
    train = setup.config.train
    total = 0
    for index in range(tasks or setup.stream.num_tasks):
        steps = len(setup.train_loader(setup.task(index), 0))
        epochs = setup.epochs(index)
        if index == 0 and train.task0 == "plain":
            epochs = train.task0_epochs or train.epochs
        total += epochs * min(steps, train.limit_batches or steps)
    return total
