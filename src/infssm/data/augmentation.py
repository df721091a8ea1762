"""Augmentation of whole batches: Mixup, CutMix, label smoothing, and the strong one of X-DER's consistency term."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.data.recipes import DIGITS, IMAGENET, LightRecipe, Recipe, Stats
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


def strong_recipe(like: Recipe) -> StrongRecipe:
    """X-DER's strong augmentation with the output size of ``like`` and the statistics it trains with."""
    stats = like.stats if isinstance(like, LightRecipe) else IMAGENET
    return StrongRecipe(size=like.size, stats=stats, flip=stats is not DIGITS)


class StrongRecipe(Recipe):
    """The strong augmentation of X-DER's consistency term, a whole batch at once.

    Random resized crop (area 0.2..1), flip, colour jitter (0.4, 0.4, 0.4, 0.1; p 0.8), greyscale (p 0.2).

    Jitter changes brightness, contrast, saturation and hue, always in this order. Images of one channel get only crop,
    flip, brightness and contrast.
    """

    def __init__(self, *, size: int, stats: Stats, flip: bool = True) -> None:
        self.size = self.raw_size = size
        self.stats = self.eval_stats = stats
        self.flip = flip

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Uniform numbers for area, aspect, two offsets, flip, four jitters, jitter on/off, grey: [count, 11]."""
        return torch.rand(count, 11, generator=rng)

    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        flips = (draws[:, 4] < 0.5) & self.flip
        x = _crop(raw.to(torch.float32) / 255, draws[:, :4], flips, self.size)
        x = torch.where((draws[:, 9] < 0.8)[:, None, None, None], _jitter(x, draws[:, 5:9]), x)
        x = torch.where((draws[:, 10] < 0.2)[:, None, None, None], grey(x).expand_as(x), x)
        return self.stats.normalize(x * 255)

    def eval(self, raw: Tensor) -> Tensor:
        """Resized and normalised only."""
        x = F.interpolate(raw.to(torch.float32), size=(self.size,) * 2, mode="bilinear", antialias=True)
        return self.stats.normalize(x)


def _crop(x: Tensor, u: Tensor, flips: Tensor, size: int) -> Tensor:
    """Random resized crops [n, channels, size, size] from uniforms [n, 4]."""
    height, width = x.shape[-2:]
    area = (0.2 + 0.8 * u[:, 0]) * height * width
    low, high = math.log(3 / 4), math.log(4 / 3)
    aspect = torch.exp(low + (high - low) * u[:, 1])
    # Half extents in the [-1, 1] coordinates of grid_sample; a box that sticks out is cut to the image.
    half_w = (torch.sqrt(area * aspect) / width).clamp(max=1)
    half_h = (torch.sqrt(area / aspect) / height).clamp(max=1)
    zero = torch.zeros_like(area)
    rows = [
        torch.stack([torch.where(flips, -half_w, half_w), zero, (2 * u[:, 3] - 1) * (1 - half_w)], dim=1),
        torch.stack([zero, half_h, (2 * u[:, 2] - 1) * (1 - half_h)], dim=1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), [len(x), x.shape[1], size, size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _jitter(x: Tensor, u: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue from uniforms [n, 4]; ``x`` [n, channels, h, w] in [0, 1]."""
    shift = ((2 * u - 1) * torch.tensor((0.4, 0.4, 0.4, 0.1)))[:, :, None, None, None]
    x = (x * (1 + shift[:, 0])).clamp(0, 1)
    mean = grey(x).mean(dim=(2, 3), keepdim=True)
    x = (mean + (x - mean) * (1 + shift[:, 1])).clamp(0, 1)
    if x.shape[1] == 1:
        return x
    pale = grey(x)
    x = (pale + (x - pale) * (1 + shift[:, 2])).clamp(0, 1)
    return turn_hue(x, shift[:, 3, 0])


def grey(x: Tensor) -> Tensor:
    """Luma [n, 1, h, w] of [n, 3, h, w] (ITU-R 601); one channel stays as it is."""
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


def turn_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of RGB [n, 3, h, w] in [0, 1] by ``turn`` [n, 1, 1] of a full circle, through HSV."""
    value, largest = x.max(dim=1)
    chroma = value - x.min(dim=1).values
    safe = chroma.clamp(min=1e-12)
    r, g, b = x.unbind(1)
    sector = torch.stack([(g - b) / safe, 2 + (b - r) / safe, 4 + (r - g) / safe])
    hue = sector.gather(0, largest[None])[0] + 6 * turn
    # Channel = value - chroma * max(0, min(k, 4 - k, 1)) with k = (n + hue) mod 6 and n = 5, 3, 1 for R, G, B.
    channels = []
    for n in (5, 3, 1):
        k = (n + hue) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)
