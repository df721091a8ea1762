"""What a recipe is: from raw images to model input, in training and in evaluation."""

from __future__ import annotations

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
