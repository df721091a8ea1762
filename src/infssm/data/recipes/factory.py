"""Recipes by name, fitted to a data set."""

from __future__ import annotations

from typing import Literal

from infssm._registry import suggest
from infssm.data.dataset import Dataset
from infssm.data.facts import ImageFacts
from infssm.data.recipes.base import Recipe
from infssm.data.recipes.deit import deit_recipe
from infssm.data.recipes.light import LightRecipe
from infssm.data.recipes.stats import CIFAR100, IMAGENET, default_stats
from infssm.data.recipes.strong import StrongRecipe
from infssm.errors import ConfigError

_RECIPES = ("deit", "light", "none")
_LARGE = 224


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
        dataset: whose statistics and image size to use, itself or what it is like.
        size: output height and width; unless given 224 for ``deit`` and for files, else the size images have.
        eval_normalization: ``authors`` repeats a quirk of the paper's released code, which trains CIFAR-100 with
            ImageNet statistics and evaluates it with CIFAR's. It changes nothing for other data sets.
        val_transform: ``train`` passes validation images through the training transform, as the released code does
            for CIFAR-100 and CUB-200.
    """
    if name not in _RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{suggest(name, _RECIPES)}")
    if eval_normalization not in ("same", "authors"):
        raise ConfigError(f"eval_normalization must be 'same' or 'authors', got {eval_normalization!r}")
    if val_transform not in ("eval", "train"):
        raise ConfigError(f"val_transform must be 'eval' or 'train', got {val_transform!r}")
    facts = dataset if isinstance(dataset, ImageFacts) else dataset.image_facts
    quirk = eval_normalization == "authors" and facts.name == "cifar100"
    augment_val = val_transform == "train"
    if name == "deit":
        return deit_recipe(size=size or _LARGE, eval_stats=CIFAR100 if quirk else None, augment_val=augment_val)
    size = size or _own_size(facts)
    stats = IMAGENET if quirk else default_stats(facts.name, facts.channels)
    plain = name == "none"
    return LightRecipe(
        size=size,
        stats=stats,
        eval_stats=CIFAR100 if quirk else None,
        pad=0 if plain else max(1, size // 8),
        flip=not plain and _may_flip(facts),
        augment_val=augment_val,
    )


def strong_recipe(dataset: Dataset | ImageFacts, like: Recipe) -> StrongRecipe:
    """X-DER's strong augmentation with the output size of ``like`` and the statistics it trains with."""
    stats = like.stats if isinstance(like, LightRecipe) else IMAGENET
    return StrongRecipe(size=like.size, stats=stats, flip=_may_flip(dataset))


def _own_size(facts: ImageFacts) -> int:
    if facts.height is None:
        return _LARGE
    if facts.height != facts.width:
        raise ConfigError(
            f"{facts.name} has images of {facts.height}x{facts.width}; choose the size of the square input"
        )
    return facts.height


def _may_flip(dataset: Dataset | ImageFacts) -> bool:
    """A mirrored digit is another sign, or none."""
    return dataset.name != "digits"
