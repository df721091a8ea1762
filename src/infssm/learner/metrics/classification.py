"""The confusion matrix, calibration of probabilities, and separation of unknown samples from known ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from infssm.errors import DataError


@dataclass(frozen=True)
class Confusion:
    """Test images after a task, decided among all classes seen so far.

    Attributes:
        counts: [classes, classes] images; rows are the true class, columns the predicted one, in stream order.
        classes: names in stream order.
        task_sizes: classes of each task, in order.
    """

    counts: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], classes: Sequence[str], task_sizes: Sequence[int]) -> Confusion:
        """Build from counts over the classes seen so far, and the names and tasks of the whole stream."""
        table = np.asarray(counts, dtype=np.int64)
        seen = len(table)
        ends = list(accumulate(task_sizes))
        return cls(table, tuple(classes[:seen]), tuple(task_sizes[: ends.index(seen) + 1]))

    @property
    def per_class(self) -> npt.NDArray[np.float64]:
        """Accuracy on each class: [classes], NaN where it has no test image."""
        totals = self.counts.sum(1)
        share = np.full(len(totals), np.nan)
        np.divide(self.counts.diagonal(), totals, out=share, where=totals > 0)
        return share

    @property
    def names_per_task(self) -> list[tuple[str, ...]]:
        """Class names, task by task."""
        ends = list(accumulate(self.task_sizes))
        return [self.classes[end - size : end] for size, end in zip(self.task_sizes, ends, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain values; only pairs of classes that occur are listed."""
        rows, columns = np.nonzero(self.counts)
        triples = [[int(i), int(j), int(self.counts[i, j])] for i, j in zip(rows, columns, strict=True)]
        return {"classes": list(self.classes), "task_sizes": list(self.task_sizes), "images": triples}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Confusion:
        """Rebuild what :meth:`to_json` wrote."""
        try:
            classes, sizes = tuple(map(str, data["classes"])), tuple(map(int, data["task_sizes"]))
            counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
            for i, j, images in data["images"]:
                counts[i, j] = images
            if sum(sizes) != len(classes):
                raise ValueError(f"{len(classes)} classes in tasks of {sizes}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"this is not a stored confusion matrix: {error!r}") from error
        return cls(counts, classes, sizes)


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
