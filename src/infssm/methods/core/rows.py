"""Rows of a model's input: how many there are, and some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Input = Tensor | Mapping[str, Any]
"""What a model is called with: one tensor ``[b, ...]``, or keyword arguments."""


def count_rows(x: Input) -> int:
    """Samples in a model's input."""
    return len(x if isinstance(x, Tensor) else next(iter(x.values())))


def share(fraction: float, count: int) -> int:
    """How many of ``count`` rows a fraction stands for: rounded up, so never none."""
    return min(count, math.ceil(round(fraction * count, 9)))


def take_rows(values: Mapping[str, Any], rows: Tensor, count: int) -> dict[str, Any]:
    """Keyword arguments of a call on ``rows: [m]`` of ``count``: tensors with a row per sample are cut to those."""
    return {key: value[rows] if _per_sample(value, count) else value for key, value in values.items()}


def first_rows(x: Input, count: int | None) -> Input:
    """The first ``count`` rows of a model's input; all where it is None."""
    return x[:count] if isinstance(x, Tensor) else {key: value[:count] for key, value in x.items()}


def _per_sample(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
