"""Settings as plain values: text, finite numbers, true and false, null, lists and mappings of these, nothing else.

YAML can say more than a setting means: itself as its own part, a number of 5,000 digits, a date, a gigabyte in ten
lines of aliases. All of it is refused here, in one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from infssm._registry import shorten
from infssm.errors import ConfigError

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_DEEPEST, _MOST = 16, 10_000
_LARGEST = 2**63


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text; ``what`` names it in errors."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(getattr(error, "problem", None) or error)
    except RecursionError:
        reason = "it is nested too deeply"
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        reason = str(error)  # what the reader raises for tagged values such as `!!int x` and dates that are none
    raise ConfigError(f"cannot read {what}, it is not YAML: {shorten(reason, 200)}")


def plain(value: Any, where: str = "") -> Any:
    """Return ``value`` if it is plain, else raise; ``2e5`` becomes a number, which YAML 1.1 takes for text."""
    return _plain(value, where, 0, [0])


def _plain(value: Any, where: str, depth: int, count: list[int]) -> Any:
    count[0] += 1
    if depth > _DEEPEST:
        raise ConfigError(f"{_place(where)} holds itself, or is nested more than {_DEEPEST} deep")
    if count[0] > _MOST:
        raise ConfigError(f"{_place(where)}: more than {_MOST:,} values (aliases count each time they are used)")
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{_place(where)}: the name {shorten(repr(key))} is not text; put it in quotes")
            _check_text(key, where)
            found[key] = _plain(item, f"{where}.{key}" if where else key, depth + 1, count)
        return found
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1, count) for item in value]
    if isinstance(value, str):
        _check_text(value, where)
        if not _EXPONENT.fullmatch(value):
            return value
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{_place(where)}: {value} is not a finite number")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise ConfigError(f"{_place(where)}: a number of {value.bit_length()} bits; at most 63 are possible")
    if value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(f"{_place(where)}: {shorten(repr(value))} is neither text nor a number, list or mapping")
    return value


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{_place(where)}: {shorten(ascii(text))} is not valid Unicode") from None
    if "\0" in text:
        raise ConfigError(f"{_place(where)}: {shorten(ascii(text))} holds a NUL character")


def _place(where: str) -> str:
    return shorten(where) if where else "the configuration"
