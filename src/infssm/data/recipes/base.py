"""What a recipe is: from raw images to model input, in training and in evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infssm._seeding import seeded
from infssm.data.images import to_pil
from infssm.data.recipes.stats import IMAGENET, Stats

if TYPE_CHECKING:
    from PIL.Image import Image


class Recipe(ABC):
    """Turns raw uint8 images into model input.

    Randomness is drawn apart from its use: :meth:`draw` makes one row of numbers per image, :meth:`apply` is a pure
    function of images and rows. So each process can draw for the whole batch and apply to its own part, and images
    out of a replay buffer go the same way as fresh ones.

    Attributes:
        channels: colour channels of the output.
        size: height and width of the output.
        raw_size: height and width of raw images read from files (arrays keep their own size).
        eval_stats: normalisation in evaluation.
        augment_val: whether validation images pass the training transform, as in the paper's released code for
            CIFAR-100 and CUB-200.
    """

    channels: int
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
        eval: evaluation transform of a PIL image.
        channels: colour channels of the output.
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
        channels: int = 3,
        size: int,
        raw_size: int,
        eval_stats: Stats = IMAGENET,
        augment_val: bool = False,
    ) -> None:
        self._train = train
        self._eval = eval
        self.channels = channels
        self.size = size
        self.raw_size = raw_size
        self.eval_stats = eval_stats
        self.augment_val = augment_val

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """One seed per image: int64 [count]."""
        return torch.randint(2**62, (count,), generator=rng)

    def train_image(self, image: Image, seed: int) -> Tensor:
        """One image, augmented as ``seed`` says: float32 [channels, size, size]."""
        with seeded(seed):
            return self._train(image)

    def eval_image(self, image: Image) -> Tensor:
        """One image for evaluation: float32 [channels, size, size]."""
        return self._eval(image)

    def apply(self, raw: Tensor, draws: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return torch.stack([self.train_image(to_pil(r), int(s)) for r, s in zip(raw, draws, strict=True)])

    def eval(self, raw: Tensor) -> Tensor:
        """See :class:`Recipe`."""
        return torch.stack([self.eval_image(to_pil(r)) for r in raw])
