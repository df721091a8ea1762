"""One row of a comparison: a set-up over its seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from infssm.learner.metrics import ACCURACY, AccuracyMatrix, Measure, Summary


@dataclass(frozen=True)
class Row:
    """One set-up over its seeds.

    Attributes:
        benchmark: data set, number of tasks and model, followed by the settings that distinguish benchmarks with the
            same three.
        method: name of the method.
        label: the method, followed by the settings that distinguish set-ups of the same method.
        seeds: seeds of the runs, in increasing order.
        measures: mean and standard deviation of every measure over the seeds, as fractions.
        matrices: one accuracy matrix per seed.
        names_per_task: class names of each task; empty where they were not recorded or differ between seeds.
    """

    benchmark: str
    method: str
    label: str
    seeds: tuple[int, ...]
    measures: dict[str, Summary]
    matrices: tuple[AccuracyMatrix, ...]
    names_per_task: tuple[tuple[str, ...], ...] = ()

    @property
    def measure(self) -> Measure:
        """What the matrices hold."""
        return self.matrices[0].measure

    @property
    def aa_curve(self) -> list[float]:
        """AA after every task, mean over seeds, as shown: in percent, or bits."""
        return [self.measure.scale * float(v) for v in np.mean([m.aa_curve for m in self.matrices], axis=0)]

    @property
    def aa_range(self) -> tuple[list[float], list[float]] | tuple[()]:
        """Lowest and highest AA of the seeds after every task, as shown; empty for one seed."""
        if len(self.matrices) < 2:
            return ()
        curves = self.measure.scale * np.array([m.aa_curve for m in self.matrices])
        return curves.min(0).tolist(), curves.max(0).tolist()

    @property
    def aa_error(self) -> float | None:
        """Standard error of the mean AA: over seeds, or of the test images where there is one seed.

        Unknown (None) for one seed without image counts.
        """
        aa = self.measures["aa"]
        if aa.std is not None:
            return aa.std / math.sqrt(aa.runs)
        if self.measure != ACCURACY:
            return None
        final = self.matrices[0].class_incremental
        variances = final.values[-1] * (1 - final.values[-1]) / final.samples
        error = float(np.sqrt(variances.sum())) / len(variances)
        return None if math.isnan(error) else error

    @property
    def forgetting(self) -> list[float]:
        """Forgetting per task, mean over seeds, as shown: in points, or bits."""
        return [
            self.measure.scale * float(v)
            for v in np.mean([m.class_incremental.forgetting_per_task() for m in self.matrices], axis=0)
        ]
