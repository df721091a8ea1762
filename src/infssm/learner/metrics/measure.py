"""What a stream measures of a model on a task: its name, its unit, and its direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infssm.errors import DataError


@dataclass(frozen=True)
class Measure:
    """What the cells of a matrix are.

    Attributes:
        key: name in files.
        title: name in tables and plots.
        unit: of values as they are shown.
        change: unit of differences as they are shown.
        higher_is_better: the direction of the measure. Whatever ranks, selects, prunes or searches by a value uses
            this (or :attr:`sign` and :meth:`improves`) instead of assuming that higher is better.
        scale: from a value to what is shown.
        digits: after the point.
        top: largest possible value; None where there is none.
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


ACCURACY = Measure("accuracy", "accuracy", "%", "points", scale=100.0, top=1.0)
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits", "bits", higher_is_better=False, digits=3)
BITS_PER_TOKEN = Measure("bits_per_token", "bits per token", "bits", "bits", higher_is_better=False, digits=3)
RMSE = Measure("rmse", "RMSE", "RMSE", "RMSE", higher_is_better=False, digits=3)

_KNOWN = {measure.key: measure for measure in (ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, RMSE)}


def measure_of(key: str) -> Measure:
    """The measure of a name in a file."""
    if key not in _KNOWN:
        raise DataError(f"unknown measure {key!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[key]
