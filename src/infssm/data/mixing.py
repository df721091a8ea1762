"""Mixup, CutMix and label smoothing on a whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError


@dataclass(frozen=True)
class Mixing:
    """Mixes every image with its mirror in the batch order, and the targets with it.

    One weight per batch. The mirror of image i in a batch of n is image n - 1 - i, so n must be even.

    Attributes:
        num_classes: classes of the whole data set: the width of soft targets.
        mixup_alpha: parameter of Mixup's Beta distribution; 0 switches Mixup off.
        cutmix_alpha: parameter of CutMix's Beta distribution; 0 switches CutMix off.
        switch: probability of CutMix where both are on.
        smoothing: label smoothing; every class gets ``smoothing / num_classes``.
    """

    num_classes: int
    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    switch: float = 0.5
    smoothing: float = 0.1

    @property
    def blends(self) -> bool:
        """Whether images are mixed at all, or only labels smoothed."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def require_even(self, batch_size: int) -> None:
        """Raise ConfigError for a batch in which an image would be its own mirror."""
        if self.blends and batch_size % 2:
            raise ConfigError(f"mixing pairs up the images of a batch: the batch size must be even, got {batch_size}")

    def __call__(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mix a batch.

        Args:
            x: float [n, channels, height, width].
            y: int64 [n] labels.
            rng: where the weight and the box are drawn.

        Returns:
            Mixed images [n, channels, height, width] and soft targets [n, num_classes].
        """
        self.require_even(len(x))
        off = self.smoothing / self.num_classes
        soft = F.one_hot(y, self.num_classes).to(x.dtype) * (1 - self.smoothing) + off
        if not self.blends:
            return x, soft
        cut = self.cutmix_alpha > 0
        if cut and self.mixup_alpha > 0:
            cut = float(torch.rand((), generator=rng, dtype=torch.float64)) < self.switch
        # One draw of Beta(alpha, alpha); torch's own takes no generator.
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        weight = float(np.random.default_rng(int(torch.randint(2**62, (), generator=rng))).beta(alpha, alpha))
        if not cut:
            x = x * weight + x.flip(0) * (1 - weight)
        else:
            height, width = x.shape[-2:]
            top, bottom = _span(height, int(height * sqrt(1 - weight)), rng)
            left, right = _span(width, int(width * sqrt(1 - weight)), rng)
            mixed = x.clone()
            mixed[:, :, top:bottom, left:right] = x.flip(0)[:, :, top:bottom, left:right]
            # The share of the pixels that are kept: a box at the border is clipped.
            x, weight = mixed, 1 - (bottom - top) * (right - left) / (height * width)
        return x, soft * weight + soft.flip(0) * (1 - weight)


def make_mixing(num_classes: int, kind: str = "none", *, label_smoothing: float = 0.0) -> Mixing | None:
    """``deit``: Mixup 0.8 and CutMix 1.0 on every batch. ``none``: label smoothing alone, or nothing (None)."""
    if kind == "deit":
        return Mixing(num_classes, smoothing=label_smoothing)
    if kind != "none":
        raise ConfigError(f"unknown mixing {kind!r}; use 'deit' or 'none'")
    if label_smoothing == 0:
        return None
    return Mixing(num_classes, mixup_alpha=0, cutmix_alpha=0, smoothing=label_smoothing)


def _span(length: int, cut: int, rng: torch.Generator) -> tuple[int, int]:
    """A stretch of ``cut`` around a random centre, clipped to [0, length]."""
    centre = int(torch.randint(length, (), generator=rng))
    return max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, length)
