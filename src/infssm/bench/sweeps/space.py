"""The search space: settings with a range or a list of values instead of one value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from infssm.errors import ConfigError
from infssm.learner.config.load import split_values

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:|int:)?({_NUMBER})\.\.({_NUMBER})")
_DIGITS = 4
"""Significant digits of a number: a command people can read, and no two settings that differ in nothing."""


Part: TypeAlias = "FloatDistribution | IntDistribution | CategoricalDistribution"
Space: TypeAlias = Mapping[str, Part]


def parse_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, Part]]:
    """The settings that are fixed, and those that are searched, by name, as Optuna's distributions.

    Searched are ``method.weight=log:1e-2..1e6`` (every decade alike), ``train.lr_scale=0.1..1`` (every number alike),
    ``model.options.depth=int:1..8`` (whole numbers) and ``data.recipe=light,none`` (a list).
    """
    from optuna.distributions import CategoricalDistribution

    fixed: list[str] = []
    space: dict[str, Part] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        match = _RANGE.fullmatch(text.strip())
        values = [value.strip() for value in split_values(text)]
        if match is None and len(values) == 1:
            if ".." in text and re.match(r"\s*(log:|int:|[-+]?\.?\d)", text):
                raise ConfigError(f"{override}: a range is written low..high, log:low..high or int:low..high")
            fixed.append(override)
            continue
        if key in space:
            raise ConfigError(f"{key} is searched twice")
        space[key] = _range(override, *match.groups()) if match else CategoricalDistribution(values)
    return fixed, space


def _range(override: str, kind: str | None, first: str, last: str) -> FloatDistribution | IntDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high = float(first), float(last)
    if low >= high:
        raise ConfigError(f"{override}: the lower end of a range must be below the upper one")
    if kind == "log:" and low <= 0:
        raise ConfigError(f"{override}: a range in decades (log:) must begin above 0")
    if kind != "int:":
        return FloatDistribution(low, high, log=kind == "log:")
    if not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{override}: the ends of a range of whole numbers (int:) must be whole")
    return IntDistribution(int(low), int(high))


def overrides_of(space: Space, params: Mapping[str, Any]) -> list[str]:
    """The values of a trial as settings; numbers have few digits and stay in their range."""
    from optuna.distributions import FloatDistribution

    settings = []
    for key, part in space.items():
        text = str(params[key])
        if isinstance(part, FloatDistribution):
            text = f"{min(max(float(f'{params[key]:.{_DIGITS}g}'), part.low), part.high):g}"
        settings.append(f"{key}={text}")
    return settings


def ends_of(space: Space) -> list[dict[str, Any]]:
    """Values of two trials, at the lower and at the upper end of all ranges and lists."""
    from optuna.distributions import CategoricalDistribution

    ends: dict[str, Sequence[Any]] = {}
    for key, part in space.items():
        ends[key] = part.choices if isinstance(part, CategoricalDistribution) else (part.low, part.high)
    return [{key: values[end] for key, values in ends.items()} for end in (0, -1)]
