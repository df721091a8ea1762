"""Shift, flip, normalise: a recipe for small images that works on the whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.data.recipes.base import Recipe
from infssm.data.recipes.stats import Stats


class LightRecipe(Recipe):
    """Random shift by up to ``pad`` pixels, random horizontal flip, normalisation.

    Args:
        size: height and width of the output; images of another size are resized first.
        stats: normalisation in training.
        eval_stats: normalisation in evaluation; the same unless given.
        pad: largest shift in pixels; what moves in from outside is black.
        flip: whether to flip at random. Not for digits or letters.
        augment_val: see :class:`Recipe`.
    """

    def __init__(
        self,
        *,
        size: int,
        stats: Stats,
        eval_stats: Stats | None = None,
        pad: int = 4,
        flip: bool = True,
        augment_val: bool = False,
    ) -> None:
        self.size = self.raw_size = size
        self.stats = stats
        self.channels = len(stats.mean)
        self.eval_stats = eval_stats or stats
        self.pad = pad
        self.flip = flip
        self.augment_val = augment_val

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Vertical and horizontal offset and flip: int64 [count, 3]."""
        offsets = torch.randint(2 * self.pad + 1, (count, 2), generator=rng)
        flips = torch.randint(2, (count, 1), generator=rng)
        return torch.cat([offsets, flips], dim=1)

    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        x = resize(raw, self.size)
        if self.pad:
            x = F.pad(x, (self.pad,) * 4)
            windows = x.unfold(2, self.size, 1).unfold(3, self.size, 1)
            x = windows[torch.arange(len(x)), :, draws[:, 0], draws[:, 1]]
        if self.flip:
            x = torch.where(draws[:, 2].bool()[:, None, None, None], x.flip(-1), x)
        return self.stats.normalize(x)

    def eval(self, raw: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return self.eval_stats.normalize(resize(raw, self.size))


def resize(raw: Tensor, size: int) -> Tensor:
    """uint8 [n, channels, h, w] to uint8 [n, channels, size, size], bilinear; unchanged where it has that size."""
    if raw.shape[-2:] == (size, size):
        return raw
    x = F.interpolate(raw.to(torch.float32), size=(size, size), mode="bilinear", antialias=True)
    return x.round_().clamp_(0, 255).to(torch.uint8)
