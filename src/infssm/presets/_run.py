"""`infssm.run`: a preset, a config file or a mapping in, a result out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infssm.presets._load import load_preset
from infssm.train import Result, load_config, merge
from infssm.train import run as run_config
from infssm.train._load import parse_overrides
from infssm.train.fitting import fitted


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
    out: folder for run directories (default ``"runs"``). seed: default 0. Both, and ``data_root``, go before what the
    mapping, file or overrides say, and leave it alone where they are not given.
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
    config = load_config(_fitted(source, tuple(overrides), data_root))
    changes: dict[str, Any] = {}
    if seed is not None:
        changes["seed"] = seed
    if out is not None:
        changes["out"] = os.fspath(out)
    if data_root is not None:
        changes["data"] = {"root": os.fspath(data_root)}
    return run_config(load_config(merge(config.model_dump(mode="json"), changes)))


def _fitted(
    source: Mapping[str, Any] | Path, overrides: tuple[str, ...], data_root: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """All that was given, and what fits the data where no model was."""
    given = merge(load_config(source).model_dump(mode="json", exclude_unset=True), parse_overrides(overrides))
    return merge(fitted(given, None if data_root is None else os.fspath(data_root)), given)
