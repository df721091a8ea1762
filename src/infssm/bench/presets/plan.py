"""What a command would run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from infssm._modality import modality_named
from infssm.bench.experiment import Experiment, make_plan
from infssm.bench.presets.fast import FAST
from infssm.bench.presets.load import main_job
from infssm.bench.running import run_path
from infssm.data import TaskStream
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.fitting import fitted
from infssm.learner.config.grid import expand_overrides
from infssm.learner.config.load import load_config, merge, parse_overrides
from infssm.learner.setup import build, check_config
from infssm.methods import check_suits
from infssm.models import kinds_of_model
from infssm.models.hub import HubModel, is_hub


def plan(
    source: Mapping[str, Any] | Path | None,
    overrides: Sequence[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    data_root: str | None = None,
    out: str | None = None,
    fast_dev_run: bool = False,
    job: str | None = None,
) -> list[Experiment]:
    """Experiments of validated configurations: one per seed and choice from the lists of values among ``overrides``.

    Without a ``source`` and without a method among the ``overrides``, each of these stands for the main job's methods,
    or those of the benchmark ``job``. Data without a model get one that fits (see
    :func:`~infssm.learner.config.fitting.fitted`).
    """
    options: dict[str, Any] = {}
    if out is not None:
        options["out"] = out
    if data_root is not None:
        options["data"] = {"root": data_root}
    if fast_dev_run:
        options["train"] = FAST
    fits = _remembering(partial(fitted, data_root=data_root))
    configs = []
    for seed in [None] if seeds is None else seeds:
        for chosen in expand_overrides(overrides):
            command = merge(parse_overrides(chosen), options if seed is None else {**options, "seed": seed})
            configs += _configs(source, command, fits, job)
    return make_plan(configs)


def _remembering(fits: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Data are looked at once, not again for each seed."""
    known: dict[str, dict[str, Any]] = {}

    def remembered(given: Mapping[str, Any]) -> dict[str, Any]:
        key = json.dumps([given.get("data"), given.get("model")], sort_keys=True)
        if key not in known:
            known[key] = fits(given)
        return known[key]

    return remembered


def _configs(
    source: Mapping[str, Any] | Path | None,
    command: Mapping[str, Any],
    fits: Callable[[Mapping[str, Any]], dict[str, Any]],
    job: str | None,
) -> list[RunConfig]:
    """The configuration of one choice, or one for each of the main job's methods.

    Later layers go before earlier ones: the preset (of a job, or what fits the data), the file, the command line.
    """
    preset, methods = ({}, ()) if source is not None else main_job(command) if job is None else main_job(command, job)
    file = {} if source is None else load_config(source).model_dump(mode="json", exclude_unset=True)
    load_config(merge(file, command))  # what is wrong in it is told before data are looked at
    if job is None:
        preset = merge(preset, fits(merge(file, command)))
    chosen = [{"method": method} for method in methods if "method" not in command and _suits(method["name"], preset)]
    configs = []
    for method in chosen or [{}]:
        configs.append(load_config(reduce(merge, (preset, method, file, command))))
        check_config(configs[-1])
    return configs


def _suits(method: str, base: Mapping[str, Any]) -> bool:
    """Whether one of a job's methods works on the data that the job's model is for."""
    model, by = base["model"]["name"], base["data"].get("by")
    for kind in HubModel.takes if is_hub(model) else kinds_of_model(model):
        try:
            check_suits(method, kind, domains=(by or modality_named(kind).by) != "class")
        except ConfigError:
            continue
        return True
    return False


def describe(config: RunConfig) -> str:
    """One line on a run after loading its data and building its model: it would really start."""
    setup = build(config, torch.device("cpu"))
    sizes = {part: sum(len(getattr(task, part)) for task in setup.stream) for part in ("train", "val", "test")}
    parameters = sum(p.numel() for p in setup.method.module.parameters())
    epochs = [setup.epochs(t) for t in range(setup.stream.num_tasks)]
    if config.train.task0 == "plain":
        epochs[0] = config.train.task0_epochs or config.train.epochs
    return (
        f"{config.method.name} on {config.data.name}: {setup.stream.num_tasks} tasks {_of(setup.stream)}, "
        f"{sizes['train']:,} / {sizes['val']:,} / {sizes['test']:,} {setup.stream.facts.modality.word}, "
        f"{config.model.name} with {parameters:,} parameters, epochs per task {epochs}, "
        f"seed {config.seed} -> {run_path(config)}"
    )


def _of(stream: TaskStream) -> str:
    """What the tasks are of."""
    if stream.domains:
        return f"in new domains ({', '.join(stream.domains)})"
    return f"of {_shares(stream.task_sizes)} classes"


def _shares(sizes: Sequence[int]) -> str:
    """``10`` where all tasks have as many, else ``50, 10, 10``."""
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
