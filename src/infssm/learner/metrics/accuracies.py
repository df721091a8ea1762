"""What a run measures of each task, and what follows from it: averages, forgetting, transfer, confusions.

``values[i, j]`` is the accuracy (fraction) on the test images of task j after training task i; entries with j > i are
NaN. All measures are taken after the last row, so values cut to their first rows give the measures at that step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from infssm.errors import ConfigError, DataError

Matrix = NDArray[np.float64]
ForgettingRule = Literal["code", "paper"]


@dataclass(frozen=True)
class Quantity:
    """The measure in the cells of a matrix.

    Attributes:
        key: name in files.
        title: name in tables and plots.
        unit: unit of displayed values.
        change: unit of displayed differences.
        higher_is_better: the direction. Whatever ranks, selects, prunes or searches by a value uses
            this (or :attr:`sign` and :meth:`improves`) instead of assuming that higher is better.
        scale: factor from a value to the displayed one.
        digits: after the point.
        top: largest possible value; None if there is none.
    """

    key: str
    title: str
    unit: str
    change: str
    higher_is_better: bool = True
    scale: float = 1.0
    digits: int = 2
    top: float | None = None

    @property
    def sign(self) -> int:
        """1 where higher values are better, else -1; ``sign * value`` is to be maximised."""
        return 1 if self.higher_is_better else -1

    def show(self, value: float) -> str:
        """A value, or a difference, without its unit; ``–`` where it is unknown."""
        return "–" if math.isnan(value) else f"{self.scale * value:.{self.digits}f}"

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far; the first one that is known is."""
        if math.isnan(value):
            return False
        return best is None or self.sign * value > self.sign * best

    def allows(self, value: float) -> bool:
        """Whether there can be such a value."""
        return value >= 0 and (self.top is None or value <= self.top)


ACCURACY = Quantity("accuracy", "accuracy", "%", "points", scale=100.0, top=1.0)
BITS_PER_BYTE = Quantity("bits_per_byte", "bits per byte", "bits", "bits", higher_is_better=False, digits=3)
BITS_PER_TOKEN = Quantity("bits_per_token", "bits per token", "bits", "bits", higher_is_better=False, digits=3)
RMSE = Quantity("rmse", "RMSE", "RMSE", "RMSE", higher_is_better=False, digits=3)

_KNOWN = {quantity.key: quantity for quantity in (ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, RMSE)}


def quantity_of(key: str) -> Quantity:
    """The quantity of a name in a file."""
    if key not in _KNOWN:
        raise DataError(f"unknown measure {key!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[key]


class Accuracies:
    """The accuracies of one scenario, and what follows from the rows that are finished.

    Attributes:
        values: [tasks, tasks] accuracies as fractions (or values of another quantity), NaN above the diagonal and in
            rows that are not finished.
        samples: [tasks] test images per task.
        quantity: what the values are. Forgetting and transfer count in the direction that is better: forgetting is
            positive where a task got worse, transfer where it got better.
        steps: rows that are finished.
    """

    def __init__(
        self, values: Matrix, samples: Matrix, quantity: Quantity = ACCURACY, steps: int | None = None
    ) -> None:
        self.values, self.samples, self.quantity = values, samples, quantity
        self.steps = len(values) if steps is None else steps

    @property
    def finished(self) -> Matrix:
        """The finished rows: [steps, steps]."""
        return self.values[: self.steps, : self.steps]

    @property
    def aa_curve(self) -> Matrix:
        """AA after every step, tasks weighing equally: ``AA_i = mean_{j <= i} a[i, j]``, [steps]."""
        return np.array([row[: i + 1].mean() for i, row in enumerate(self.finished)])

    @property
    def weighted_aa_curve(self) -> Matrix:
        """AA after every step, images weighing equally: [steps]. NaN when the image counts are unknown."""
        if np.isnan(self.samples[: self.steps]).any():
            return np.full(self.steps, np.nan)
        rows = enumerate(self.finished)
        return np.array([np.average(row[: i + 1], weights=self.samples[: i + 1]) for i, row in rows])

    @property
    def aa(self) -> float:
        """Average accuracy over the seen tasks after the last step."""
        return float(self.aa_curve[-1]) if self.steps else math.nan

    @property
    def weighted_aa(self) -> float:
        """Accuracy over all images of the seen tasks after the last step (other toolkits' "average accuracy")."""
        return float(self.weighted_aa_curve[-1]) if self.steps else math.nan

    @property
    def aia(self) -> float:
        """Average incremental accuracy: mean of the AA curve."""
        return mean_or_nan(self.aa_curve)

    @property
    def weighted_aia(self) -> float:
        """Mean of the image-weighted AA curve."""
        return mean_or_nan(self.weighted_aa_curve)

    @property
    def harmonic(self) -> float:
        """Harmonic mean of the last accuracies on task 0 and on all images of later tasks; NaN before the second."""
        if self.steps < 2:
            return math.nan
        last, images = self.finished[-1], self.samples[: self.steps]
        base, new = float(last[0]), float((last[1:] * images[1:]).sum() / images[1:].sum())
        return 2 * base * new / (base + new) if base + new > 0 else 0.0

    @property
    def bwt(self) -> float:
        """Backward transfer: mean change of earlier tasks since each was learnt; NaN before the second task."""
        return mean_or_nan(self.transfer_per_task()) if self.steps else math.nan

    def fm(self, rule: ForgettingRule = "code") -> float:
        """Forgetting measure: the mean of :meth:`forgetting_per_task`; NaN before the second task."""
        return mean_or_nan(self.forgetting_per_task(rule))

    def forgetting_per_task(self, rule: ForgettingRule = "code") -> Matrix:
        """Drop of every task but the last from its best accuracy to its final one: [steps - 1].

        ``code`` takes the best over steps j..T-1, so the final accuracy takes part and no value is negative (the form
        of the released code, and of most toolkits). ``paper`` takes it over j..T-2, so a task that ends at its best
        counts as negative forgetting. The paper's range also names steps before j, where no accuracy exists.
        """
        if rule not in ("code", "paper"):
            raise ConfigError(f"unknown rule of forgetting {rule!r}; use 'code' or 'paper'")
        a, last = self.quantity.sign * self.finished, self.steps - 1
        end = last + 1 if rule == "code" else last
        return np.array([a[j:end, j].max() - a[last, j] for j in range(last)])

    def transfer_per_task(self) -> Matrix:
        """Change of every task but the last since it was learnt, ``a[T-1, j] - a[j, j]``: [steps - 1]."""
        a = self.quantity.sign * self.finished
        return a[-1, :-1] - np.diagonal(a)[:-1]


def mean_or_nan(values: Matrix) -> float:
    """Mean, or NaN where there is nothing to average (a single task neither forgets nor transfers)."""
    return float(values.mean()) if values.size else math.nan


@dataclass(frozen=True)
class Summary:
    """One measure over several runs.

    Attributes:
        mean: mean over runs.
        std: sample standard deviation (ddof = 1); None for a single run.
        runs: how many runs.
    """

    mean: float
    std: float | None
    runs: int

    def format(self, *, scale: float = 100.0, digits: int = 2) -> str:
        """``"53.21 ± 0.40"``, in percent by default; ``"-"`` if the measure is undefined."""
        if math.isnan(self.mean):
            return "-"
        mean = f"{self.mean * scale:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std * scale:.{digits}f}"


@dataclass(frozen=True)
class Confusion:
    """Test images after a task, decided among all classes seen so far.

    Attributes:
        counts: [classes, classes] images; rows are the true class, columns the predicted one, in stream order.
        classes: names in stream order.
        task_sizes: classes of each task, in order.
    """

    counts: NDArray[np.int64]
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
    def per_class(self) -> Matrix:
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
