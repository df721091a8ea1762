"""The confusion matrix: test images by true and predicted class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

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
        """From counts over the classes seen so far, and the names and tasks of the whole stream."""
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
