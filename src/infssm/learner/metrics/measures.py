"""Measures of one accuracy matrix, as pure functions.

``a[i, j]`` is the accuracy (fraction) on the test images of task j after training task i; entries with j > i are NaN.
All measures are taken after the last row, so a matrix cut to its first rows gives the values at that step.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from infssm.errors import ConfigError

Matrix = NDArray[np.float64]
ForgettingRule = Literal["code", "paper"]


def aa_curve(a: Matrix, samples: Matrix | None = None) -> Matrix:
    """AA after every step: ``AA_i = mean_{j <= i} a[i, j]``.

    Args:
        a: [steps, steps] accuracies.
        samples: [steps] test images per task; given, tasks weigh by their images instead of equally.

    Returns:
        [steps] averages.
    """
    weights = np.ones(len(a)) if samples is None else np.asarray(samples, dtype=np.float64)
    return np.array([np.average(a[i, : i + 1], weights=weights[: i + 1]) for i in range(len(a))])


def per_task_forgetting(a: Matrix, rule: ForgettingRule = "code") -> Matrix:
    """Drop of every task but the last from its best accuracy to its final one.

    ``code`` takes the best over steps j..T-1, so the final accuracy takes part and no value is negative (the form of
    the released code, and of most toolkits). ``paper`` takes it over j..T-2, so a task that ends at its best counts
    as negative forgetting. The paper's range also names steps before j, where no accuracy exists.

    Args:
        a: [steps, steps] accuracies.
        rule: which maximum.

    Returns:
        [steps - 1] forgetting per task.
    """
    if rule not in ("code", "paper"):
        raise ConfigError(f"unknown rule of forgetting {rule!r}; use 'code' or 'paper'")
    last = len(a) - 1
    end = last + 1 if rule == "code" else last
    return np.array([a[j:end, j].max() - a[last, j] for j in range(last)])


def per_task_transfer(a: Matrix) -> Matrix:
    """Change of every task but the last since it was learnt: ``a[T-1, j] - a[j, j]``, as [steps - 1]."""
    return a[-1, :-1] - np.diagonal(a)[:-1]


def mean_or_nan(values: Matrix) -> float:
    """Mean, or NaN where there is nothing to average (a single task neither forgets nor transfers)."""
    return float(values.mean()) if values.size else float("nan")
