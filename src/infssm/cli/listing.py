"""``infssm list``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer

from infssm._registry import suggest
from infssm.errors import ConfigError


def command(
    what: Annotated[str, typer.Argument(help="methods, models, datasets, distances, presets or studies.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what can be named in a configuration.

    Example: `infssm list methods`
    """
    if what not in _KINDS:
        raise ConfigError(f"cannot list {what!r}{suggest(what, _KINDS)}")
    entries = _KINDS[what]()
    if as_json:
        typer.echo(json.dumps([{"name": name, "summary": summary} for name, summary in entries.items()], indent=2))
        return
    width = max(map(len, entries), default=0)
    for name, summary in entries.items():
        typer.echo(f"{name:<{width}}  {summary}".rstrip())


def _methods() -> dict[str, str]:
    from infssm.methods import describe_method, list_methods

    return {name: describe_method(name) for name in list_methods()}


def _models() -> dict[str, str]:
    from infssm.models import describe_model, list_models

    return {name: describe_model(name) for name in list_models()}


def _datasets() -> dict[str, str]:
    from infssm.data import list_datasets
    from infssm.data.registry import DATASETS

    return {name: DATASETS[name].summary for name in list_datasets()}


def _distances() -> dict[str, str]:
    from infssm.geometry import list_distances

    return dict.fromkeys(list_distances(), "")


def _presets() -> dict[str, str]:
    from infssm.presets import list_presets, load_preset

    return {name: load_preset(name).summary for name in list_presets()}


def _studies() -> dict[str, str]:
    from infssm.studies import describe_study, list_studies

    return {name: describe_study(name) for name in list_studies()}


_KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": _methods,
    "models": _models,
    "datasets": _datasets,
    "distances": _distances,
    "presets": _presets,
    "studies": _studies,
}
