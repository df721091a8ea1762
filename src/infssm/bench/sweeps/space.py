"""What is searched: settings with a range or a list of values in the place of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from infssm.errors import ConfigError
from infssm.learner.config.load import split_values

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:|int:)?({_NUMBER})\.\.({_NUMBER})")
_DIGITS = 4
"""Significant digits of a number: a command people can read, and no two settings that differ in nothing."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; ``log``: equally many in every decade; ``whole``: integers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def distribution(self) -> BaseDistribution:
        """In Optuna's words."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.log)

    def text(self, value: Any) -> str:
        """A value as it is written on the command line."""
        if self.whole:
            return str(int(value))
        return f"{min(max(float(f'{value:.{_DIGITS}g}'), self.low), self.high):g}"

    @property
    def values(self) -> tuple[float, ...]:
        """The ends of the range."""
        return self.low, self.high


@dataclass(frozen=True)
class Choice:
    """One of several values, as they are written on the command line."""

    values: tuple[str, ...]

    def distribution(self) -> BaseDistribution:
        """In Optuna's words."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def text(self, value: Any) -> str:
        """A value as it is written on the command line."""
        return str(value)


Space: TypeAlias = Mapping[str, Range | Choice]


def parse_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, Range | Choice]]:
    """The settings that are fixed, and those that are searched, by name.

    Searched are ``method.weight=log:1e-2..1e6`` (every decade alike), ``train.lr_scale=0.1..1`` (every number alike),
    ``model.options.depth=int:1..8`` (whole numbers) and ``data.recipe=light,none`` (a list).
    """
    fixed: list[str] = []
    space: dict[str, Range | Choice] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        match = _RANGE.fullmatch(text.strip())
        values = split_values(text)
        if match is None and len(values) == 1:
            if ".." in text and re.match(r"\s*(log:|int:|[-+]?\.?\d)", text):
                raise ConfigError(f"{override}: a range is written low..high, log:low..high or int:low..high")
            fixed.append(override)
            continue
        if key in space:
            raise ConfigError(f"{key} is searched twice")
        space[key] = _range(override, *match.groups()) if match else Choice(tuple(v.strip() for v in values))
    return fixed, space


def _range(override: str, kind: str | None, low: str, high: str) -> Range:
    bounds = Range(float(low), float(high), log=kind == "log:", whole=kind == "int:")
    if bounds.low >= bounds.high:
        raise ConfigError(f"{override}: the lower end of a range must be below the upper one")
    if bounds.log and bounds.low <= 0:
        raise ConfigError(f"{override}: a range in decades (log:) must begin above 0")
    if bounds.whole and not (bounds.low.is_integer() and bounds.high.is_integer()):
        raise ConfigError(f"{override}: the ends of a range of whole numbers (int:) must be whole")
    return bounds


def overrides_of(space: Space, params: Mapping[str, Any]) -> list[str]:
    """The values of a trial as settings."""
    return [f"{key}={dimension.text(params[key])}" for key, dimension in space.items()]
