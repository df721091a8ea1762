"""From YAML, mappings and ``key=value`` overrides to a `RunConfig`, and back."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from infssm._registry import suggest
from infssm.errors import ConfigError
from infssm.train.config import RunConfig, one_spelling

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_NOT_HASHED = ("seed", "out", "log", "data.root", "train.num_workers", "train.log_every")


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> RunConfig:
    """Build a validated `RunConfig` from a mapping or a YAML file, then ``section.key=value`` overrides.

    Whatever is left out keeps its default. Unknown keys raise :class:`~infssm.errors.ConfigError` with a suggestion.
    """
    values = dict(source) if isinstance(source, Mapping) else {} if source is None else _read_yaml(Path(source))
    values = merge(_numbers(values), parse_overrides(overrides))
    _check_keys(values, RunConfig, "")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, mappings merged key by key.

    A section given by its name alone (``method: ewc``) is a mapping with that ``name``; a new
    ``method.name`` or ``model.name`` drops the options and weights of what it replaces.
    """
    merged = dict(base)
    for key, new in changes.items():
        old = merged.get(key)
        if key in ("data", "model", "method"):
            old, new = _named(old), _named(new)
            if key != "data" and old and "name" in new and not _same_name(key, old.get("name"), new["name"]):
                old = {}
        merged[key] = merge(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
    return merged


def _same_name(section: str, one: Any, other: Any) -> bool:
    if section == "method" and isinstance(one, str) and isinstance(other, str):
        return one_spelling(one) == one_spelling(other)
    return bool(one == other)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Turn ``["train.epochs=10", "method.weight=2e5"]`` into a nested mapping; values are YAML."""
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"cannot read {override!r}: overrides look like train.epochs=10")
        try:
            value = _numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ConfigError(f"cannot read the value of {override!r}: {error}") from None
        for part in reversed(path.split(".")):
            value = {part: value}
        values = merge(values, value)
    return values


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain values, all fields included."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    """Return the configuration as YAML that :func:`load_config` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits over all that decides the results but the seed, so that runs of one set-up share them."""
    values = to_dict(config)
    for path in _NOT_HASHED:
        *parents, key = path.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section.pop(key)
    start = Path(config.train.task0)
    if config.train.task0 != "train" and start.is_file():  # what the weights are, not where they lie
        values["train"]["task0"] = hashlib.sha256(start.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


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


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections such as `train:`, not {type(values).__name__}")
    return values or {}


def _numbers(value: Any) -> Any:
    """Read ``2e5`` as a number everywhere: YAML 1.1 takes it for a string."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    """Raise for a key no section has, with the closest one; pydantic checks the values."""
    if model.model_config.get("extra") == "allow":
        return
    for key, value in values.items():
        field = model.model_fields.get(str(key))
        if field is None:
            raise ConfigError(f"unknown setting {prefix}{key}{suggest(str(key), model.model_fields)}")
        kind = field.annotation
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _check_keys(value, kind, f"{prefix}{key}.")
