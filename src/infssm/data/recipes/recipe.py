"""What a recipe is: from raw images to model input, in training and in evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._seeding import seeded
from infssm.data.images import to_pil

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Stats:
    """Mean and standard deviation per channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize(self, raw: Tensor) -> Tensor:
        """uint8 or float [n, channels or 1, h, w] in 0..255 to normalised float32 [n, channels, h, w]."""
        mean = torch.tensor(self.mean, dtype=torch.float32).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32).view(-1, 1, 1)
        x = raw.expand(-1, len(self.mean), -1, -1).to(torch.float32, copy=True)
        return x.mul_(1 / (255 * std)).sub_(mean / std)


IMAGENET = Stats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = Stats((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
DIGITS = Stats((0.3053,), (0.3761,))


class Recipe(ABC):
    """Turns raw uint8 images into model input.

    Drawing random numbers is separate from using them: :meth:`draw` makes one row of numbers per image, :meth:`apply`
    is a pure function of images and rows. So each process can draw for the whole batch and apply to its own part, and
    images from a replay buffer are transformed as new ones are.

    Attributes:
        size: height and width of the output.
        raw_size: height and width of raw images read from files (arrays keep their own size).
        eval_stats: normalisation in evaluation.
        augment_val: whether validation images get the training transform, as in the paper's released code for
            CIFAR-100 and CUB-200.
    """

    size: int
    raw_size: int
    eval_stats: Stats
    augment_val: bool = False

    @abstractmethod
    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Random numbers for ``count`` images: [count, ...]."""

    @abstractmethod
    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """Training transform: uint8 [n, channels, h, w] and its draws [n, ...] to float32 [n, channels, size, size]."""

    @abstractmethod
    def eval(self, raw: Tensor) -> Tensor:
        """Evaluation transform: uint8 [n, channels, h, w] to float32 [n, channels, size, size]."""

    def train(self, raw: Tensor, rng: torch.Generator) -> Tensor:
        """Training transform with fresh randomness: uint8 [n, channels, h, w] to float32 [n, channels, size, size]."""
        return self.apply(raw, self.draw(len(raw), rng))


class PerImageRecipe(Recipe):
    """A recipe made of transforms for single PIL images; the loader runs it in worker processes.

    Args:
        train: training transform of a PIL image, drawing from the global generators.
        eval: evaluation transform of a PIL image to float32 [channels, size, size]; kept as ``eval_image``.
        size: height and width of the output.
        raw_size: height and width of raw images read from files.
        eval_stats: normalisation in evaluation, which ``eval`` applies.
        augment_val: see :class:`Recipe`.
    """

    def __init__(
        self,
        train: Callable[[Image], Tensor],
        eval: Callable[[Image], Tensor],
        *,
        size: int,
        raw_size: int,
        eval_stats: Stats = IMAGENET,
        augment_val: bool = False,
    ) -> None:
        self._train, self.eval_image = train, eval
        self.size, self.raw_size = size, raw_size
        self.eval_stats, self.augment_val = eval_stats, augment_val

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """One seed per image: int64 [count]."""
        return torch.randint(2**62, (count,), generator=rng)

    def train_image(self, image: Image, seed: int) -> Tensor:
        """One image, augmented with the randomness of ``seed``: float32 [channels, size, size]."""
        with seeded(seed):
            return self._train(image)

    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return torch.stack([self.train_image(to_pil(r), int(s)) for r, s in zip(raw, draws, strict=True)])

    def eval(self, raw: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return torch.stack([self.eval_image(to_pil(r)) for r in raw])


class LightRecipe(Recipe):
    """For small images, a whole batch at once: random shift and horizontal flip, normalisation.

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
        self.stats, self.eval_stats = stats, eval_stats or stats
        self.pad, self.flip, self.augment_val = pad, flip, augment_val

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Vertical and horizontal offset and flip: int64 [count, 3]."""
        offsets = torch.randint(2 * self.pad + 1, (count, 2), generator=rng)
        flips = torch.randint(2, (count, 1), generator=rng)
        return torch.cat([offsets, flips], dim=1)

    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        x = self._resize(raw)
        if self.pad:
            x = F.pad(x, (self.pad,) * 4)
            windows = x.unfold(2, self.size, 1).unfold(3, self.size, 1)
            x = windows[torch.arange(len(x)), :, draws[:, 0], draws[:, 1]]
        if self.flip:
            x = torch.where(draws[:, 2].bool()[:, None, None, None], x.flip(-1), x)
        return self.stats.normalize(x)

    def eval(self, raw: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return self.eval_stats.normalize(self._resize(raw))

    def _resize(self, raw: Tensor) -> Tensor:
        """uint8 [n, channels, h, w] to uint8 [n, channels, size, size], bilinear; images of that size are unchanged."""
        if raw.shape[-2:] == (self.size, self.size):
            return raw
        x = F.interpolate(raw.to(torch.float32), size=(self.size, self.size), mode="bilinear", antialias=True)
        return x.round_().clamp_(0, 255).to(torch.uint8)


class StrongRecipe(Recipe):
    """The strong augmentation of X-DER's consistency term, a whole batch at once.

    Random resized crop (area 0.2..1), flip, colour jitter (0.4, 0.4, 0.4, 0.1; p 0.8), greyscale (p 0.2).

    Jitter changes brightness, contrast, saturation and hue, always in this order. Images of one channel get only crop,
    flip, brightness and contrast.

    Args:
        size: height and width of the output.
        stats: normalisation.
        flip: whether to flip at random.
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
