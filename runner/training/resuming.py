"""Values that a resumed training takes from its recipe, and changes with which it cannot
continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from runner.plugin.learner import Learner
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError


def settings_of_state(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that a checkpoint records, because its state contains their values."""
    values = recipe.values()
    by_role = {role: optimizer.values() for role, optimizer in recipe.optimizer.items()}
    return {"optimizer": by_role, "lr_scheduler": values["lr_scheduler"]}


def changed_by_role(
    before: Mapping[str, Any], recipe: Recipe
) -> Iterator[tuple[str, set[str]]]:
    """Yields the names of the optimizer settings that have changed since a checkpoint, by role.

    The learning rate counts as changed where its schedule has.
    """
    now = settings_of_state(recipe)
    schedule = {"lr"} if before["lr_scheduler"] != now["lr_scheduler"] else set[str]()
    for role, values in now["optimizer"].items():
        old = before["optimizer"].get(role, {})
        yield (
            role,
            schedule
            | {name for name, value in values.items() if old.get(name) != value},
        )


def apply_changed_settings(
    learner: Learner,
    recipe: Recipe,
    before: Mapping[str, Any] | None,
    configured: Sequence[Sequence[dict[str, Any]]],
) -> None:
    """Gives optimizers the recipe's value of every setting that is another one than in the checkpoint.

    Args:
        learner: A learner that has loaded the checkpoint.
        recipe: The recipe of the resumed training.
        before: The settings at the checkpoint; None if an earlier version wrote it, which recorded none.
        configured: The parameter groups of every optimizer as the recipe made them.
    """
    changed = {} if before is None else dict(changed_by_role(before, recipe))
    for (role, optimizer), groups in zip(learner.optimizers(), configured, strict=True):
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            for name in changed.get(role, set()) & new.keys() - {"params"}:
                if isinstance(
                    group[name], torch.Tensor
                ):  # a captured graph reads it from where it is
                    group[name].fill_(float(new[name]))
                else:
                    group[name] = new[name]


def refuse_other_classes(trained: Sequence[str] | None, present: Sequence[str]) -> None:
    """Raises a UsageError if labels have another meaning than in the training.

    Args:
        trained: The names of the classes in the checkpoint; None or empty if it has none.
        present: Those of the source.
    """
    if not trained or list(trained) == list(present):
        return
    if len(trained) != len(present):
        change = f"the model was trained with {len(trained)} classes, and the data have {len(present)}"
    else:
        number = next(
            n
            for n, (old, new) in enumerate(zip(trained, present, strict=True))
            if old != new
        )
        change = f"class {number} was '{trained[number]}' when the model was trained, and is '{present[number]}' now"
    raise UsageError(f"data: {change}; restore the names, or train again")
