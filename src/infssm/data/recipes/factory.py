"""Recipes by name, made for a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from infssm._registry import suggest
from infssm._torchvision import timm
from infssm.data.dataset import Dataset
from infssm.data.facts import ImageFacts
from infssm.data.recipes.recipe import (
    CIFAR100,
    DIGITS,
    IMAGENET,
    LightRecipe,
    PerImageRecipe,
    Recipe,
    Stats,
    StrongRecipe,
)
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

_RECIPES = ("deit", "light", "none")
_LARGE = 224
_STATS = {"cifar100": CIFAR100, "cifar100-base": CIFAR100, "digits": DIGITS, "omniglot": DIGITS}
"""Normalisation by data set, or by the packaged weights whose training images were normalised so."""
_CROP_SHARE = 0.875


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
        return deit_recipe(size=size or _LARGE, eval_stats=eval_stats, augment_val=augment_val)
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


def strong_recipe(like: Recipe) -> StrongRecipe:
    """X-DER's strong augmentation with the output size of ``like`` and the statistics it trains with."""
    stats = like.stats if isinstance(like, LightRecipe) else IMAGENET
    return StrongRecipe(size=like.size, stats=stats, flip=stats is not DIGITS)


def deit_recipe(
    *, size: int = _LARGE, stats: Stats = IMAGENET, eval_stats: Stats | None = None, augment_val: bool = False
) -> PerImageRecipe:
    """The DeiT recipe through timm, with which the paper's released code trains.

    Random resized crop, flip, RandAugment, normalisation and random erasing; resize and centre crop to evaluate.

    Args:
        size: height and width of the output.
        stats: normalisation in training, and fill colour of RandAugment.
        eval_stats: normalisation in evaluation; the same unless given.
        augment_val: see :class:`~infssm.data.recipes.recipe.Recipe`.
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
        mean=stats.mean,
        std=stats.std,
    )
    for step in train.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    check = eval_stats or stats
    evaluate = create(size, interpolation="bicubic", crop_pct=_CROP_SHARE, mean=check.mean, std=check.std)
    return PerImageRecipe(
        _ToRGB(train),
        _ToRGB(evaluate),
        size=size,
        raw_size=int(size / _CROP_SHARE),
        eval_stats=check,
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
