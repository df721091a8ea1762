"""Recipes: from raw images to model input, in training and in evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._registry import suggest
from infssm._seeding import seeded
from infssm._torchvision import timm
from infssm.data.dataset import Dataset
from infssm.data.images import ImageFacts, to_pil, to_raw
from infssm.errors import ConfigError

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
_RECIPES = ("deit", "light", "none")
_LARGE = 224
_STATS = {"cifar100": CIFAR100, "cifar100-base": CIFAR100, "digits": DIGITS, "omniglot": DIGITS}
"""Normalisation by data set, or by the packaged weights whose training images were normalised so."""
_CROP_SHARE = 0.875


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
        by_image: whether images are transformed one by one, as PIL images.
    """

    by_image: ClassVar[bool] = False
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

    def eval_image(self, image: Image) -> Tensor:
        """Evaluation transform of a PIL image of any size: float32 [channels, size, size]."""
        return self.eval(to_raw(image, self.raw_size)[None])[0]

    def train(self, raw: Tensor, rng: torch.Generator) -> Tensor:
        """Training transform with fresh randomness: uint8 [n, channels, h, w] to float32 [n, channels, size, size]."""
        return self.apply(raw, self.draw(len(raw), rng))


class PerImageRecipe(Recipe):
    """A recipe made of transforms for single PIL images; the loader runs it in worker processes.

    Args:
        train: training transform of a PIL image, drawing from the global generators.
        eval: evaluation transform of a PIL image to float32 [channels, size, size], normalised by ``eval_stats``.
    """

    by_image = True

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
        self._train, self._eval = train, eval
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
        return torch.stack([self._eval(to_pil(r)) for r in raw])

    def eval_image(self, image: Image) -> Tensor:
        """See :class:`Recipe`."""
        return self._eval(image)


class LightRecipe(Recipe):
    """For small images, a whole batch at once: random shift and horizontal flip, normalisation.

    Args:
        size: height and width of the output; images of another size are resized first.
        stats: normalisation in training.
        eval_stats: normalisation in evaluation; the same unless given.
        pad: largest shift in pixels; what moves in from outside is black.
        flip: whether to flip at random. Not for digits or letters.
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


def list_recipes() -> list[str]:
    """Names :func:`make_recipe` knows."""
    return list(_RECIPES)


def make_recipe(
    name: str,
    dataset: Dataset | ImageFacts,
    *,
    size: int | None = None,
    eval_normalization: Literal["same", "authors"] = "same",
    val_transform: Literal["eval", "train"] = "eval",
) -> Recipe:
    """Build a recipe.

    Args:
        name: ``deit`` (crop, flip, RandAugment, erasing through timm), ``light`` (shift and flip on the whole batch)
            or ``none`` (normalisation only).
        dataset: the data set, or its facts, that statistics and image size follow.
        size: output height and width; unless given 224 for ``deit`` and for files, else the size images have.
        eval_normalization: ``authors`` reproduces a quirk of the paper's released code, which trains CIFAR-100 with
            ImageNet statistics and evaluates it with CIFAR's. It changes nothing for other data sets.
        val_transform: ``train`` applies the training transform to validation images, as the released code does for
            CIFAR-100 and CUB-200.
    """
    if name not in _RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{suggest(name, _RECIPES)}")
    if eval_normalization not in ("same", "authors"):
        raise ConfigError(f"eval_normalization must be 'same' or 'authors', got {eval_normalization!r}")
    if val_transform not in ("eval", "train"):
        raise ConfigError(f"val_transform must be 'eval' or 'train', got {val_transform!r}")
    facts = dataset if isinstance(dataset, ImageFacts) else dataset.images.facts(dataset.name)
    quirk = eval_normalization == "authors" and facts.name == "cifar100"
    eval_stats, augment_val = CIFAR100 if quirk else None, val_transform == "train"
    if name == "deit":
        return deit_recipe(size=size or _LARGE, eval_stats=eval_stats or IMAGENET, augment_val=augment_val)
    if size is None and facts.height != facts.width:
        raise ConfigError(
            f"{facts.name} has images of {facts.height}x{facts.width}; choose the size of the square input"
        )
    size = size or facts.height or _LARGE
    stats = _STATS.get(facts.name)
    stats = stats or (IMAGENET if facts.channels == 3 else Stats((0.5,), (0.5,)))
    return LightRecipe(
        size=size,
        stats=IMAGENET if quirk else stats,
        eval_stats=eval_stats,
        pad=0 if name == "none" else max(1, size // 8),
        flip=name != "none" and stats is not DIGITS,  # a mirrored digit or letter is another sign, or none
        augment_val=augment_val,
    )


def deit_recipe(*, size: int = _LARGE, eval_stats: Stats = IMAGENET, augment_val: bool = False) -> PerImageRecipe:
    """The DeiT recipe through timm, with which the paper's released code trains.

    Random resized crop, flip, RandAugment, normalisation and random erasing; resize and centre crop to evaluate.
    """
    create = timm("data").create_transform
    train = create(
        size,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
        mean=IMAGENET.mean,  # the fill colour of RandAugment, too
        std=IMAGENET.std,
    )
    for step in train.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    evaluate = create(size, interpolation="bicubic", crop_pct=_CROP_SHARE, mean=eval_stats.mean, std=eval_stats.std)
    return PerImageRecipe(
        _ToRGB(train),
        _ToRGB(evaluate),
        size=size,
        raw_size=int(size / _CROP_SHARE),
        eval_stats=eval_stats,
        augment_val=augment_val,
    )


def _posterize(image: Image, bits: int, **_: Any) -> Image:
    """Keep the highest ``bits`` of every channel.

    RandAugment at magnitude 10 asks for 0 bits, which newer versions of Pillow refuse and older ones turn to black.
    """
    from PIL import Image as pil
    from PIL import ImageOps

    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else pil.new(image.mode, image.size)


class _ToRGB:
    """A transform that accepts grey images too (a class, so that it can be sent to worker processes)."""

    def __init__(self, transform: Callable[[Image], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Image) -> Tensor:
        return self.transform(image.convert("RGB"))
