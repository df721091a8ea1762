"""One step's worth of training data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples and targets of one step; ``x, y = batch`` takes the first two.

    Attributes:
        x: images float32 [n, channels, height, width], augmented and mixed; or sequences float32 [n, time, width], or
            tokens int64 [n, time], padded with zeros.
        y: int64 [n] stream labels.
        soft: float32 [n, classes] soft targets, where mixing or label smoothing is on.
        raw: uint8 [n, channels, height, width] before augmentation, where asked for.
        index: int64 [n] data set indices.
        mask: bool [n, time], True where a sequence has a step and False where it is padded; None for images.
    """

    x: Tensor
    y: Tensor
    soft: Tensor | None = None
    raw: Tensor | None = None
    index: Tensor | None = None
    mask: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Batch:
        """Model input and targets on ``device``; raw images and indices stay where they are."""
        soft, mask = (None if part is None else part.to(device) for part in (self.soft, self.mask))
        return replace(self, x=self.x.to(device), y=self.y.to(device), soft=soft, mask=mask)
