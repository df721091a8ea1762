"""Lists of values on the command line: ``train.lr=1e-3,1e-4`` stands for two commands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from infssm._registry import shorten
from infssm.errors import ConfigError

_OPEN, _CLOSED, _QUOTES = "[{", "]}", "'\""
_MOST = 10_000
"""Runs of a grid: more are a mistake."""


def expand_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for every choice of one value each, the last list varying fastest.

    Values are separated by commas outside brackets and quotes: ``data.tasks=[[0, 1], [5]]`` is one value, and so is
    ``data='"a,b"'``.
    """
    choices = [_choices(override) for override in overrides]
    count = 1
    for found in choices:
        count *= len(found)
        if count > _MOST:
            raise ConfigError(f"the lists of values make {count:,} runs or more; at most {_MOST:,} are possible")
    return [list(chosen) for chosen in itertools.product(*choices)]


def _choices(override: str) -> list[str]:
    key, equals, text = override.partition("=")
    values = split_values(text)
    if len(values) == 1:
        return [override]
    if not all(value.strip() for value in values):
        raise ConfigError(f"an empty value in the list {shorten(repr(override))}: write key=one,two")
    return [f"{key}{equals}{value.strip()}" for value in values]


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
