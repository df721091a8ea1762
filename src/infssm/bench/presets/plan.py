"""From a preset, a file and a command line to the experiments they ask for."""

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
from infssm.bench.presets.fast import FAST
from infssm.bench.presets.load import MAIN_JOB, load_preset, main_job
from infssm.errors import ConfigError
from infssm.learner.config.load import expand_overrides, load_config, merge, parse_overrides
from infssm.learner.config.resolve import fitted
from infssm.learner.result import Result
from infssm.learner.setup import check_config
from infssm.methods import check_suits
from infssm.models import kinds_of_model
from infssm.models.hub import PREFIX, HubModel


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
            f"{what!r} with lists of values makes {len(plans)} runs, and this carries out one: use "
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
    :func:`~infssm.learner.config.fitting.fitted`).
    """
    options: dict[str, Any] = {} if out is None else {"out": out}
    if data_root is not None:
        options["data"] = {"root": data_root}
    if fast_dev_run:
        options["train"] = FAST
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
