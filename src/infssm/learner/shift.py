"""Is new, unlabelled data like what was taught? A two-sample test on the distances to the nearest class."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from infssm.errors import DataError

_EXACT = 10_000
"""Samples of either kind up to which the p-value is exact."""


class Shift(NamedTuple):
    """How unlike new data is to what was taught.

    Attributes:
        p_value: how likely a difference at least this large is between two halves of the same data.
        statistic: the Kolmogorov-Smirnov statistic: the largest gap between the two distribution functions, 0 to 1.
        sentence: what this means.
    """

    p_value: float
    statistic: float
    sentence: str


def shift(held_out_distances: Tensor, new_distances: Tensor) -> Shift:
    """Compare new samples with held-out samples of what was taught by their distance to the nearest class.

    The two-sample Kolmogorov-Smirnov test, as in Renate's detectors.

    Args:
        held_out_distances: [m, K] distances to all classes, or [m] to the nearest.
        new_distances: [n, K] or [n], likewise.
    """
    old, new = (_nearest(distances) for distances in (held_out_distances, new_distances))
    if not len(old) or not len(new):
        raise DataError("there is nothing to compare: give at least one new sample, and hold out some when teaching")
    values = np.concatenate([old, new])
    gaps = np.searchsorted(old, values, side="right") / len(old) - np.searchsorted(new, values, side="right") / len(new)
    statistic = float(np.abs(gaps).max())
    p_value = _p_value(statistic, len(old), len(new))
    middle = [float(np.median(part)) for part in (old, new)]
    figures = (
        f"median distance to the nearest class {middle[1]:.3g}, held-out samples {middle[0]:.3g}; p = {p_value:.2g}"
    )
    if _p_value(1.0, len(old), len(new)) >= 0.05:
        sentence = (
            f"{len(new)} new and {len(old)} held-out samples are too few to tell whether they differ ({figures})."
        )
    elif p_value >= 0.05:
        sentence = f"The {len(new)} new samples look like what was taught ({figures})."
    elif middle[1] >= middle[0]:
        sure = "are unlike" if p_value < 0.01 else "may be unlike"
        sentence = f"The {len(new)} new samples {sure} what was taught: they are further from every class ({figures})."
    else:
        sentence = (
            f"The {len(new)} new samples are closer to the classes than held-out ones ({figures}): they vary less, or "
            "were taught already."
        )
    return Shift(p_value, statistic, sentence)


def _nearest(distances: Tensor) -> NDArray[np.float64]:
    """Sorted distances to the nearest class."""
    nearest = distances.amin(dim=1) if distances.ndim == 2 and len(distances) else distances.flatten()
    return np.sort(nearest.double().cpu().numpy())


def _p_value(statistic: float, m: int, n: int) -> float:
    """Probability of at least this statistic where both samples are of one continuous distribution.

    Orders of m + n values are lattice paths from (0, 0) to (m, n), all equally likely, and the statistic is their
    largest ``|i/m - j/n|``: the paths that stay below it are counted row by row (Hodges 1958). Beyond 10,000 samples
    the limiting distribution serves.
    """
    if max(m, n) > _EXACT:
        x = 2 * statistic**2 * m * n / (m + n)
        terms = [2 * (-1) ** (k - 1) * math.exp(-(k**2) * x) for k in range(1, 101)]
        return float(np.clip(sum(terms), 0, 1))
    common = math.gcd(m, n)
    bound = round(statistic * (m // common) * n)  # of |i·n - j·m| / gcd, in whole numbers
    if bound == 0:
        return 1.0
    columns = np.arange(n + 1)
    inside = np.abs(columns * m) // common < bound
    paths = np.where(np.logical_and.accumulate(inside), 1.0, 0.0)
    scale = 0.0
    for row in range(1, m + 1):
        inside = np.abs(row * n - columns * m) // common < bound
        paths = np.where(inside, np.cumsum(np.where(inside, paths, 0.0)), 0.0)
        largest = paths.max()
        if largest == 0:
            return 1.0
        paths, scale = paths / largest, scale + math.log(largest)
    if paths[-1] == 0:
        return 1.0
    total = math.lgamma(m + n + 1) - math.lgamma(m + 1) - math.lgamma(n + 1)
    return float(np.clip(-np.expm1(scale + math.log(paths[-1]) - total), 0, 1))
