"""What a stream measures of a model on a task: its name, its unit, and which way is better."""

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
        better: 1 where higher values are better, -1 where lower ones are.
        scale: from a value to what is shown.
        digits: after the point.
        top: largest possible value; None where there is none.
    """

    key: str
    title: str
    unit: str
    change: str
    better: int = 1
    scale: float = 1.0
    digits: int = 2
    top: float | None = None

    def show(self, value: float) -> str:
        """A value, or a difference, without its unit; ``–`` where it is unknown."""
        return "–" if math.isnan(value) else f"{self.scale * value:.{self.digits}f}"

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far; the first one that is known is."""
        if math.isnan(value):
            return False
        return best is None or self.better * value > self.better * best

    def allows(self, value: float) -> bool:
        """Whether there can be such a value."""
        return value >= 0 and (self.top is None or value <= self.top)


ACCURACY = Measure("accuracy", "accuracy", "%", "points", scale=100.0, top=1.0)
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits", "bits", better=-1, digits=3)
BITS_PER_TOKEN = Measure("bits_per_token", "bits per token", "bits", "bits", better=-1, digits=3)

_KNOWN = {measure.key: measure for measure in (ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN)}


def measure_of(key: str) -> Measure:
    """The measure of a name in a file."""
    if key not in _KNOWN:
        raise DataError(f"unknown measure {key!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[key]
