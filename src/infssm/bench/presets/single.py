"""`infssm.run`: a preset, a config file or a mapping in, a result out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infssm.bench.presets.load import load_preset
from infssm.bench.presets.plan import plan
from infssm.bench.running import run as run_config
from infssm.errors import ConfigError
from infssm.learner.result import Result


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
    elif what.endswith((".yaml", ".yml")):
        source = Path(what)
    else:
        source = load_preset(what, variant).values
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
    return run_config(plans[0])
