"""Transforms: from raw images to model input."""

from infssm.data.recipes.base import PerImageRecipe, Recipe
from infssm.data.recipes.deit import deit_recipe
from infssm.data.recipes.factory import list_recipes, make_recipe, strong_recipe
from infssm.data.recipes.light import LightRecipe
from infssm.data.recipes.mixing import Mixing, make_mixing
from infssm.data.recipes.stats import CIFAR100, DIGITS, IMAGENET, Stats
from infssm.data.recipes.strong import StrongRecipe

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
