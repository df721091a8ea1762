"""Transforms: from raw images to model input."""

from infssm.data.recipes.factory import deit_recipe, list_recipes, make_recipe, strong_recipe
from infssm.data.recipes.mixing import Mixing, make_mixing
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

__all__ = [
    "CIFAR100",
    "DIGITS",
    "IMAGENET",
    "LightRecipe",
    "Mixing",
    "PerImageRecipe",
    "Recipe",
    "Stats",
    "StrongRecipe",
    "deit_recipe",
    "list_recipes",
    "make_mixing",
    "make_recipe",
    "strong_recipe",
]
