"""From YAML, mappings and ``key=value`` overrides to a `RunConfig`, and back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from infssm._registry import shorten, suggest
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig, one_spelling
from infssm.learner.config.values import plain, read_yaml
from infssm.learner.store.settings import counting

_DEEPEST = 12
"""Nesting depth at which an override is cut off; no setting is nested as deeply."""


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> RunConfig:
    """Build a validated `RunConfig` from a mapping or a YAML file, then ``section.key=value`` overrides.

    Whatever is left out keeps its default. Unknown keys raise :class:`~infssm.errors.ConfigError` with a suggestion.
    """
    values = source if isinstance(source, Mapping) else {} if source is None else _read_file(Path(source))
    values = merge(plain(values), parse_overrides(overrides))
    _check_keys(values, RunConfig, "")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: {shorten(e['msg'], 300)} (got {shorten(repr(e['input']))})"
            for e in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, mappings merged key by key.

    A section given by its name alone (``method: ewc``) is a mapping with that ``name``; a new
    ``method.name`` or ``model.name`` drops the options and weights of what it replaces. ``train.epochs`` alone
    holds for task 0 too.
    """
    merged = dict(base)
    if "epochs" in changes and "task0_epochs" not in changes:
        merged.pop("task0_epochs", None)
    for key, new in changes.items():
        old = merged.get(key)
        if key in ("data", "model", "method"):
            old, new = _named(old), _named(new)
            if key != "data" and _renames(key, old, new):
                old = {}
        merged[key] = merge(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
    return merged


def _renames(section: str, old: Any, new: Any) -> bool:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or "name" not in new:
        return False
    one, other = old.get("name"), new["name"]
    if section == "method" and isinstance(one, str) and isinstance(other, str):
        return one_spelling(one) != one_spelling(other)
    return bool(one != other)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Turn ``["train.epochs=10", "method.weight=2e5"]`` into a nested mapping; values are YAML."""
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"cannot read {shorten(repr(override))}: overrides look like train.epochs=10")
        value = read_yaml(text, f"the value of {shorten(repr(override))}")
        *parents, last = path.split(".", _DEEPEST)
        value = {last: value}
        for parent in reversed(parents):
            value = {parent: value}
        values = merge(values, plain(value))
    return values


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain values, all fields included."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    """Return the configuration as YAML that :func:`load_config` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits over all that decides the results but the seed, so that runs of one set-up share them.

    Settings equal to their defaults are left out, so that a new setting changes no hash of a run without it.
    """
    values = counting(config.model_dump(mode="json", exclude_defaults=True))
    values.pop("seed", None)
    if os.path.isfile(config.train.task0):  # the content of the weights matters, not their place
        values["train.task0"] = _digest(Path(config.train.task0))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _digest(weights: Path) -> str:
    try:
        return hashlib.sha256(weights.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"train.task0: cannot read {weights}: {error.strerror}") from None


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``"train.lr: 0.001 != 0.01"`` lines for all fields in which two nested mappings differ."""
    lines: list[str] = []
    for key in sorted({*one, *other}):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} != {b!r}")
    return lines


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {shorten(str(path))}: {error.strerror}") from None
    except ValueError as error:  # bytes that are no text, or a name that no file can have
        raise ConfigError(f"{shorten(str(path))} is not YAML: {error}") from None
    values = read_yaml(text, str(path))
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections such as `train:`, not {type(values).__name__}")
    return values or {}


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    """Raise for a key no section has, with the closest one; pydantic checks the values."""
    if model.model_config.get("extra") == "allow":
        return
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(f"unknown setting {shorten(prefix + key)}{suggest(key, model.model_fields)}")
        kind = field.annotation
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _check_keys(value, kind, f"{prefix}{key}.")
