"""Recipes: read, merged, validated, and locked beside a run."""

from runner.recipe.catalog import Catalog, Provider, Section
from runner.recipe.errors import Place, Problem, RecipeError
from runner.recipe.layers import is_lock, shipped
from runner.recipe.loader import load
from runner.recipe.lock import code_of, copy_recipe, drift, write_lock
from runner.recipe.recipe import Recipe, flatten
from runner.recipe.sections import TrackingConfig, TrainConfig

__all__ = [
    "Catalog",
    "Place",
    "Problem",
    "Provider",
    "Recipe",
    "RecipeError",
    "Section",
    "TrackingConfig",
    "TrainConfig",
    "code_of",
    "copy_recipe",
    "drift",
    "flatten",
    "is_lock",
    "load",
    "shipped",
    "write_lock",
]
