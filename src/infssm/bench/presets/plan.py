"""Turn a preset, a file and a command line into experiments, full or small ones for a test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from infssm._modality import modality_named
from infssm.bench import running
from infssm.bench.experiment import Experiment, make_plan
from infssm.bench.presets.load import MAIN_JOB, load_preset, main_job
from infssm.data import write_synthetic
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import expand_overrides, load_config, merge, parse_overrides, to_dict
from infssm.learner.config.resolve import fitted
from infssm.learner.result import Result
from infssm.learner.setup import check_config
from infssm.methods import check_suits, parse_name
from infssm.models import kinds_of_model
from infssm.models.hub import PREFIX, HubModel

_FAST = {"epochs": 1, "task0_epochs": 1, "limit_batches": 2}
"""Two steps per task: does it work?"""
_LAYOUTS = ("caltech256", "cifar100", "cub200", "imagenet-r", "speech-digits", "tiny-imagenet-200/train")
_SEQUENCES = ("speech-digits", "stdlib-text", "waves")
_DEPTH = 2
_SMALLER: dict[str, dict[str, Any]] = {
    "ewc": {"fisher_samples": 4},
    "etf": {"steps": 2},
    "lucir": {"finetune_epochs": 1},
}
"""Options that only say how long to measure."""


def run(
    what: str | Mapping[str, Any],
    *,
    data_root: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    variant: str = "paper",
    overrides: Iterable[str] = (),
) -> Result:
    """Train one method on one stream of tasks and return its result (``.aa``, ``.aia``, ``.fm``, ``.matrix``).

    what: the name of a preset (``"cifar100/5-task/inf-ssm"``), the path of a YAML config, or a nested mapping.
    data_root: folder that holds the data (default ``$INFSSM_DATA``, else ``~/.cache/infssm/data``).
    out: folder for run directories (default ``"runs"``). seed: default 0. Where given, ``out``, ``seed`` and
    ``data_root`` take precedence over the mapping, the file and the overrides.
    variant: ``"paper"`` or ``"authors-code"``, for presets. overrides: ``"train.epochs=10"`` and the like.
    A run that was interrupted continues where it stopped.
    """
    source: Mapping[str, Any] | Path
    if isinstance(what, Mapping):
        source = what
    else:
        source = Path(what) if what.endswith((".yaml", ".yml")) else load_preset(what, variant).values
    plans = plan(
        source,
        tuple(overrides),
        seeds=None if seed is None else [seed],
        data_root=None if data_root is None else os.fspath(data_root),
        out=None if out is None else os.fspath(out),
    )
    if len(plans) > 1:
        raise ConfigError(
            f"{what!r} with lists of values makes {len(plans)} runs, but only one can be run here: use "
            "infssm.bench.presets.plan and an executor of infssm.bench.executors"
        )
    return running.run(plans[0])


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
    :func:`~infssm.learner.config.resolve.fitted`).
    """
    options: dict[str, Any] = {} if out is None else {"out": out}
    if data_root is not None:
        options["data"] = {"root": data_root}
    if fast_dev_run:
        options["train"] = _FAST
    file = {} if source is None else load_config(source).model_dump(mode="json", exclude_unset=True)
    fits: dict[str, dict[str, Any]] = {}  # the data are read once, not again for each seed
    configs = []
    for seed in [None] if seeds is None else seeds:
        for chosen in expand_overrides(overrides):
            command = merge(parse_overrides(chosen), options if seed is None else {**options, "seed": seed})
            preset, methods = ({}, ()) if source is not None else main_job(command, job or MAIN_JOB)
            settings = merge(file, command)
            load_config(settings)  # report invalid settings before the data are read
            if job is None:
                key = json.dumps([settings.get("data"), settings.get("model")], sort_keys=True)
                if key not in fits:
                    fits[key] = fitted(settings, data_root=data_root)
                preset = merge(preset, fits[key])
            asked = [{"method": m} for m in methods if "method" not in command and _suits(m["name"], preset)]
            for method in asked or [{}]:
                # The one order of sources: defaults, preset, file, command line. `resolve` adds the machine's part.
                configs.append(load_config(reduce(merge, (preset, method, file, command))))
                check_config(configs[-1])
    return make_plan(configs)


def _suits(method: str, base: Mapping[str, Any]) -> bool:
    """Whether one of a job's methods works on the data that the job's model is for."""
    model, by = base["model"]["name"], base["data"].get("by")
    for kind in HubModel.supported_data if model.startswith(PREFIX) else kinds_of_model(model):
        try:
            check_suits(method, kind, domains=(by or modality_named(kind).by) != "class")
        except ConfigError:
            continue
        return True
    return False


def fast_dev_config(config: RunConfig, folder: str | os.PathLike[str]) -> RunConfig:
    """A run of ``config`` that takes a second: two tasks, two steps each, a two-layer Vim-nano on 32 x 32 pixels.

    Sequences keep their model, two layers of it. Data sets to download are replaced by generated ones in their layout,
    written under ``folder`` unless they are there; other data sets stay what they are. Results mean nothing; that the
    run passes does.
    """
    known = config.data.name in _LAYOUTS
    done = Path(folder) / f".{config.data.name.replace('/', '-')}"
    if known and not done.exists():
        write_synthetic(config.data.name, Path(folder))
        done.touch()
    sequences = config.data.name in _SEQUENCES
    data: dict[str, Any] = {"train_per_class": 1, "test_per_class": 1, "image_size": None if sequences else 32}
    if config.data.shots is not None:
        data["shots"] = 1  # generated data are too few for a published list
    if known:
        data |= {"root": os.fspath(folder), "num_tasks": 2, "base_classes": None, "tasks": None}
    elif config.data.name in ("digits", "synthetic", "stdlib-text", "waves"):
        data["num_tasks"] = 2
    method = shorter_measurements(config)
    if "inf-ssm-exact" in [component.name for component in parse_name(config.method.name).classes]:
        method["inf-ssm-exact"] = {"measure_at": 1}  # the automatic weight has two steps to be found in
    if isinstance(layers := config.method.options.get("layers"), int):
        method["layers"] = min(layers, _DEPTH)
    changes = {
        "benchmark": None,
        "data": data,
        "model": {"name": config.model.name if sequences else "vim_nano", "weights": None},
        "train": _FAST | {"batch_size": 4, "eval_batch_size": 2, "task0": "train", "num_workers": 0},
        "method": method,
        "out": os.fspath(Path(folder) / "runs"),
    }
    values = merge(to_dict(config), changes)
    small = {"n_layer": _DEPTH, "d_model": 16} if sequences else {"depth": _DEPTH, "embed_dim": 16, "patch_size": 8}
    values["model"]["options"] = small
    return load_config(values)


def shorter_measurements(config: RunConfig) -> dict[str, Any]:
    """Changes to a method's options that make it measure for a moment only."""
    return {c.name: _SMALLER[c.name] for c in parse_name(config.method.name).classes if c.name in _SMALLER}
