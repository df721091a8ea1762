"""What follows from accuracies on every task after every task: averages, forgetting, transfer.

``values[i, j]`` is the accuracy (fraction) on the test images of task j after training task i; entries with j > i are
NaN. All measures are taken after the last row, so values cut to their first rows give the measures at that step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from infssm.errors import ConfigError
from infssm.learner.metrics.measure import ACCURACY, Measure

Matrix = NDArray[np.float64]
ForgettingRule = Literal["code", "paper"]


@dataclass(frozen=True)
class Accuracies:
    """The finished rows of one scenario, and what follows from them.

    Attributes:
        values: [steps, steps] accuracies as fractions (or values of another measure), NaN above the diagonal.
        samples: [steps] test images per task.
        measure: what the values are. Forgetting and transfer count in the direction that is better: forgetting is
            positive where a task got worse, transfer where it got better.
    """

    values: Matrix
    samples: Matrix
    measure: Measure = ACCURACY

    @property
    def aa_curve(self) -> Matrix:
        """AA after every step, tasks weighing equally: ``AA_i = mean_{j <= i} a[i, j]``, [steps]."""
        return np.array([row[: i + 1].mean() for i, row in enumerate(self.values)])

    @property
    def weighted_aa_curve(self) -> Matrix:
        """AA after every step, images weighing equally: [steps]. NaN when the image counts are unknown."""
        if np.isnan(self.samples).any():
            return np.full(len(self.values), np.nan)
        rows = enumerate(self.values)
        return np.array([np.average(row[: i + 1], weights=self.samples[: i + 1]) for i, row in rows])

    @property
    def aa(self) -> float:
        """Average accuracy over the seen tasks after the last step."""
        return float(self.aa_curve[-1]) if len(self.values) else math.nan

    @property
    def weighted_aa(self) -> float:
        """Accuracy over all images of the seen tasks after the last step (other toolkits' "average accuracy")."""
        return float(self.weighted_aa_curve[-1]) if len(self.values) else math.nan

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
        if len(self.values) < 2:
            return math.nan
        last, images = self.values[-1], self.samples
        base, new = float(last[0]), float((last[1:] * images[1:]).sum() / images[1:].sum())
        return 2 * base * new / (base + new) if base + new > 0 else 0.0

    @property
    def bwt(self) -> float:
        """Backward transfer: mean change of earlier tasks since each was learnt; NaN before the second task."""
        return mean_or_nan(self.transfer_per_task()) if len(self.values) else math.nan

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
        a, last = self.measure.sign * self.values, len(self.values) - 1
        end = last + 1 if rule == "code" else last
        return np.array([a[j:end, j].max() - a[last, j] for j in range(last)])

    def transfer_per_task(self) -> Matrix:
        """Change of every task but the last since it was learnt, ``a[T-1, j] - a[j, j]``: [steps - 1]."""
        a = self.measure.sign * self.values
        return a[-1, :-1] - np.diagonal(a)[:-1]


def mean_or_nan(values: Matrix) -> float:
    """Mean, or NaN where there is nothing to average (a single task neither forgets nor transfers)."""
    return float(values.mean()) if values.size else math.nan
