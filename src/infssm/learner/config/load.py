"""Convert YAML, mappings and ``key=value`` overrides to a `RunConfig`, and back."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from infssm._registry import shorten, suggest
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig, free_settings, one_spelling

FREE = free_settings()
"""Settings that results do not depend on; they are marked where they are defined."""
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_MAX_DEPTH, _MAX_VALUES, _MAX_INTEGER = 16, 10_000, 2**63


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> RunConfig:
    """Build a validated `RunConfig` from a mapping or a YAML file, then ``section.key=value`` overrides.

    Whatever is left out keeps its default. Unknown keys raise :class:`~infssm.errors.ConfigError` with a suggestion.
    """
    values: Any = {} if source is None else source
    if not isinstance(values, Mapping):
        path = Path(values)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the config {shorten(str(path))}: {error.strerror}") from None
        except ValueError as error:  # bytes that are no text, or a name that no file can have
            raise ConfigError(f"{shorten(str(path))} is not YAML: {error}") from None
        values = _read_yaml(text, str(path)) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of sections such as `train:`, not {type(values).__name__}")
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
    """Return ``base`` updated with ``changes``, mappings merged key by key.

    A section given only by its name (``method: ewc``) is a mapping with that ``name``; a new
    ``method.name`` or ``model.name`` drops the options and weights of what it replaces. ``train.epochs`` alone
    holds for task 0 too.
    """
    merged = dict(base)
    if "epochs" in changes and "task0_epochs" not in changes:
        merged.pop("task0_epochs", None)
    for key, new in changes.items():
        old = merged.get(key)
        if key in ("data", "model", "method"):
            old, new = ({"name": value} if isinstance(value, str) else value for value in (old, new))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if key in ("model", "method") and "name" in new:
                one, other = old.get("name"), new["name"]
                if key == "method" and isinstance(one, str) and isinstance(other, str):
                    one, other = one_spelling(one), one_spelling(other)
                old = old if one == other else {}
            new = merge(old, new)
        merged[key] = new
    return merged


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Turn ``["train.epochs=10", "method.weight=2e5"]`` into a nested mapping; values are YAML."""
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"cannot read {shorten(repr(override))}: overrides look like train.epochs=10")
        value = _read_yaml(text, f"the value of {shorten(repr(override))}")
        for part in reversed(path.split(".", _MAX_DEPTH)):
            value = {part: value}
        values = merge(values, plain(value))
    return values


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as nested plain values, all fields included."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    """Return the configuration as YAML that :func:`load_config` reads back to an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits over everything that decides the results except the seed: runs that differ only in it share one.

    Settings equal to their defaults are left out, so that a new setting changes no hash of a run without it.
    """
    values = counting(config.model_dump(mode="json", exclude_defaults=True))
    values.pop("seed", None)
    weights = config.train.task0
    if os.path.isfile(weights):  # the content of the weights matters, not their place
        try:
            values["train.task0"] = hashlib.sha256(Path(weights).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"train.task0: cannot read {weights}: {error.strerror}") from None
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def counting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that decide results, the seed among them, by their dotted names."""
    return dict(flatten(config, without=FREE))


def settings_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 over the settings that decide results."""
    text = json.dumps(sorted(counting(config).items()), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(values: Mapping[str, Any], prefix: str = "", *, without: Container[str] = ()) -> list[tuple[str, Any]]:
    """Nested mappings as (dotted name, value) pairs; ``without`` names settings and whole sections to leave out."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in without:
            continue
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{name}.", without=without)
        else:
            pairs.append((name, value))
    return pairs


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return ``"train.lr: 0.001 != 0.01"`` lines for all settings in which two nested mappings differ."""
    a, b = dict(flatten(one)), dict(flatten(other))
    return [f"{key}: {a.get(key)!r} != {b.get(key)!r}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def plain(settings: Any) -> Any:
    """Settings as text, finite numbers, booleans, null, lists and mappings; ConfigError for anything else.

    YAML can express more than a setting means: a value that contains itself, a number of 5,000 digits, a date, a
    gigabyte in ten lines of aliases. All of these are refused in one line. ``2e5``, text in YAML 1.1, becomes a number.
    """
    result = [settings]
    todo: list[tuple[Any, Any, str, int]] = [(result, 0, "", 0)]  # container, key of the value, its name, depth
    count = 0
    while todo:
        container, key, name, depth = todo.pop()
        value, problem = container[key], ""
        count += 1
        if depth > _MAX_DEPTH:
            problem = f"it contains itself, or is nested more than {_MAX_DEPTH} deep"
        elif count > _MAX_VALUES:
            problem = f"more than {_MAX_VALUES:,} values (aliases count each time they are used)"
        elif isinstance(value, Mapping):
            keys = list(value)
            container[key] = dict(value)
            todo += [(container[key], k, f"{name}.{k}" if name else str(k), depth + 1) for k in keys]
            if bad := [k for k in keys if not isinstance(k, str)]:
                problem = f"the name {shorten(repr(bad[0]))} is not text; put it in quotes"
        elif isinstance(value, list | tuple):
            container[key] = list(value)
            todo += [(container[key], position, name, depth + 1) for position in range(len(value))]
        elif isinstance(value, str):
            if _EXPONENT.fullmatch(value):
                container[key] = value = float(value)
        elif isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            problem = f"a number of {value.bit_length()} bits; at most 63 are possible"
        elif value is not None and not isinstance(value, bool | int | float):
            problem = f"{shorten(repr(value))} is neither text nor a number, list or mapping"
        if isinstance(value, float) and not math.isfinite(value):
            problem = f"{value} is not a finite number"
        for text in (key, value):
            if isinstance(text, str) and ("\0" in text or text != text.encode(errors="replace").decode()):
                problem = f"{shorten(ascii(text))} holds a NUL character or is not valid Unicode"
        if problem:
            raise ConfigError(f"{shorten(name) or 'the configuration'}: {problem}")
    return result[0]


def _read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text; ``what`` names it in errors."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(getattr(error, "problem", None) or error)
    except RecursionError:
        reason = "it is nested too deeply"
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        reason = str(error)  # what the reader raises for tagged values such as `!!int x` and invalid dates
    raise ConfigError(f"cannot read {what}, it is not YAML: {shorten(reason, 200)}")


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    """Raise for a key that no section has, with the closest one, and for a boolean in place of a number.

    Pydantic checks all other values; it would read ``true`` as 1.
    """
    if model.model_config.get("extra") == "allow":
        return
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(f"unknown setting {shorten(prefix + key)}{suggest(key, model.model_fields)}")
        kind = field.annotation
        if isinstance(value, bool) and kind is not bool:
            raise ConfigError(f"{prefix}{key}: must not be true or false")
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _check_keys(value, kind, f"{prefix}{key}.")


_OPEN, _CLOSED, _QUOTES = "[{", "]}", "'\""
_MOST = 10_000
"""Runs of a grid: more are a mistake."""


def expand_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for every choice of one value each, the last list varying fastest.

    Values are separated by commas outside brackets and quotes: ``data.tasks=[[0, 1], [5]]`` is one value, and so is
    ``data='"a,b"'``.
    """
    choices: list[list[str]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        values = split_values(text)
        if len(values) > 1 and not all(value.strip() for value in values):
            raise ConfigError(f"an empty value in the list {shorten(repr(override))}: write key=one,two")
        choices.append([override] if len(values) == 1 else [f"{key}{equals}{value.strip()}" for value in values])
        if (count := math.prod(map(len, choices))) > _MOST:
            raise ConfigError(f"the lists of values make {count:,} runs or more; at most {_MOST:,} are possible")
    return [list(chosen) for chosen in itertools.product(*choices)]


def split_values(text: str) -> list[str]:
    """The parts of a text between commas that stand outside brackets and quotes.

    As in YAML, brackets and quotes count where a value begins with them: ``it's`` is a word.
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        begins = depth > 0 or not values[-1].strip()
        if quote:
            quote = "" if character == quote else quote
        elif begins and character in _QUOTES:
            quote = character
        elif begins and character in _OPEN:
            depth += 1
        elif depth and character in _CLOSED:
            depth -= 1
        if character == "," and not quote and not depth:
            values.append("")
        else:
            values[-1] += character
    return values
