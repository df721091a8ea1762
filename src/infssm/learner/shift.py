"""Is new, unlabelled data like what was taught? A two-sample test on the distances to the nearest class."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from infssm._optional import require
from infssm.errors import DataError


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

    The two-sample Kolmogorov-Smirnov test, as in Renate's detectors; exact up to 10,000 samples of either kind.

    Args:
        held_out_distances: [m, K] distances to all classes, or [m] to the nearest.
        new_distances: [n, K] or [n], likewise.
    """
    old, new = (_nearest(distances) for distances in (held_out_distances, new_distances))
    if not len(old) or not len(new):
        raise DataError("there is nothing to compare: give at least one new sample, and hold out some when teaching")
    test = require("scipy.stats", install="pip install 'infssm[bench]'").ks_2samp(old, new)
    statistic, p_value = float(test.statistic), float(test.pvalue)
    middle = [float(np.median(part)) for part in (old, new)]
    figures = (
        f"median distance to the nearest class {middle[1]:.3g}, held-out samples {middle[0]:.3g}; p = {p_value:.2g}"
    )
    # Samples that do not overlap at all lie in one of two orders, old first or new first, of all that are possible.
    if 2 / math.comb(len(old) + len(new), len(new)) >= 0.05:
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
    """Distances to the nearest class."""
    nearest = distances.amin(dim=1) if distances.ndim == 2 and len(distances) else distances.flatten()
    found: NDArray[np.float64] = nearest.double().cpu().numpy()
    return found
