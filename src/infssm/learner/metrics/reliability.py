"""Calibration of probabilities, and separation of unknown samples from known ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Mean gap between how sure a classifier is and how often it is right (Guo et al. 2017).

    Predictions are sorted into ``bins`` of equal width by the probability of the predicted class; the error is the mean
    over predictions of ``|accuracy - mean probability|`` of their bin.

    Args:
        probabilities: [n, K].
        labels: [n] true classes.
        bins: number of bins between 0 and 1.
    """
    table = np.asarray(probabilities, dtype=np.float64)
    sure, right = table.max(axis=1), table.argmax(axis=1) == np.asarray(labels)
    inside = np.clip(np.ceil(sure * bins).astype(np.int64) - 1, 0, bins - 1)  # a bin includes its upper end
    gaps = np.bincount(inside, weights=right - sure, minlength=bins)
    return float(np.abs(gaps).sum() / len(sure))


def auroc(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Area under the ROC curve: how often an unknown sample scores higher than a known one; ties count one half.

    0.5 is guessing, 1 means that one threshold separates them.
    """
    known, unknown = np.sort(np.asarray(known_scores, dtype=np.float64)), np.asarray(unknown_scores, dtype=np.float64)
    below, up_to = (np.searchsorted(known, unknown, side=side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(known)))
