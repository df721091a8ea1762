"""Fubini-Study's distance from Martin's."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this 1 - cos the series of arccos^2 is exact to rounding and has a finite derivative at 0.
_SERIES_RANGE = 1e-2


def squared_arc(martin: Tensor) -> Tensor:
    """``arccos(exp(-martin / 2))^2``: Fubini-Study from Martin, with a finite derivative at 0."""
    half = martin / 2
    x = -torch.expm1(-half)
    small = x < _SERIES_RANGE
    series = _arccos2_series(torch.where(small, x, 0))
    return torch.where(small, series, torch.arccos(torch.exp(-torch.where(small, 1, half))).square())


def _arccos2_series(x: Tensor) -> Tensor:
    """``arccos(1 - x)^2 = 2 sum_k (2 x)^k / (k^2 binom(2k, k))`` for small x."""
    terms = (1, 1 / 6, 2 / 45, 1 / 70, 8 / 1575, 4 / 2079, 16 / 21021)
    total = torch.zeros_like(x)
    for term in reversed(terms):
        total = total * x + term
    return 2 * x * total
