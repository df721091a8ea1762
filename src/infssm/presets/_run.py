"""`infssm.run`: a preset, a config file or a mapping in, a result out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infssm.presets._load import load_preset
from infssm.train import Result, load_config, merge
from infssm.train import run as run_config


def run(
    what: str | Mapping[str, Any],
    *,
    data_root: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "runs",
    seed: int = 0,
    variant: str = "paper",
    overrides: Iterable[str] = (),
) -> Result:
    """Train one method on one stream of tasks and return its result (``.aa``, ``.aia``, ``.fm``, ``.matrix``).

    what: the name of a preset (``"cifar100/5-task/inf-ssm"``), the path of a YAML config, or a nested mapping.
    data_root: folder that holds the data (default ``$INFSSM_DATA``, else ``~/.cache/infssm/data``).
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
    config = load_config(source, overrides)
    changes: dict[str, Any] = {"seed": seed, "out": os.fspath(out)}
    if data_root is not None:
        changes["data"] = {"root": os.fspath(data_root)}
    return run_config(load_config(merge(config.model_dump(mode="json"), changes)))
