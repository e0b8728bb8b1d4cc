"""A smaller model and smaller batches, with which stages of a large model are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.recipe.loader import assignments
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe

BATCH_SIZE = 32
"""Most samples of a reduced batch."""
Reduction = Mapping[str, tuple[Any, Any]]
"""Values in the recipe and in its reduced form, by path."""


def reduced(
    recipe: Recipe, load: Callable[[Sequence[str]], Recipe]
) -> tuple[Recipe, Reduction]:
    """Returns the reduced form of a recipe, and what is smaller in it.

    Args:
        recipe: The recipe.
        load: Loads the recipe with further settings, ``PATH=VALUE``. Those that the user has
            given have priority.

    Raises:
        UsageError: The recipe has no smaller form.
    """
    changed = smaller_settings(recipe)
    if not changed:
        problem = f"'{recipe.model.kind}' with '{recipe.data.kind}' has no smaller form"
        raise UsageError(f"--reduced: {problem}: leave the option out")
    changed["train.batch_size"] = min(recipe.train.batch_size, BATCH_SIZE)
    smaller = load(assignments(changed))
    values = {path: (_value(recipe, path), _value(smaller, path)) for path in changed}
    reduction = {path: pair for path, pair in values.items() if pair[0] != pair[1]}
    return smaller, reduction


def smaller_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns settings of the reduced form by path, as far as they differ from the recipe's."""
    settings = {
        f"{section}.{path}": value
        for section, config in (("model", recipe.model), ("data", recipe.data))
        for path, value in config.reduced().items()
    }
    return {
        path: value for path, value in settings.items() if value != _value(recipe, path)
    }


def described(reduction: Reduction) -> str:
    """Returns a reduction for a person."""
    parts = []
    for path, values in reduction.items():
        before, after = (
            f"{value:,}" if isinstance(value, int) else str(value) for value in values
        )
        parts.append(f"{path} {after} of {before}")
    return ", ".join(parts)


def _value(recipe: Recipe, path: str) -> Any:
    """Returns a setting; None if there is none, which loading the smaller recipe reports."""
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
