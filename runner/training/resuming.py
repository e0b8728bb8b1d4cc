"""Values that a resumed training takes from its recipe, and changes that it cannot accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from runner.plugin.learner import Learner
from runner.plugin.optimizer import ROLE_SETTINGS
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError


def settings_of_state(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that a checkpoint records, because its state contains their values."""
    values = recipe.values()
    by_role = {role: optimizer.values() for role, optimizer in recipe.optimizer.items()}
    return {"optimizer": by_role, "lr_scheduler": values["lr_scheduler"]}


def changed_by_role(
    stored: Mapping[str, Any], recipe: Recipe
) -> Iterator[tuple[str, set[str]]]:
    """Yields the names of the optimizer settings that differ from a checkpoint's, by role.

    The learning rate counts as changed if its schedule has.
    """
    settings = settings_of_state(recipe)
    is_rescheduled = stored["lr_scheduler"] != settings["lr_scheduler"]
    for role, values in settings["optimizer"].items():
        stored_values = stored["optimizer"].get(role, {})
        names = {
            name for name, value in values.items() if stored_values.get(name) != value
        }
        if is_rescheduled:
            names.add("lr")
        if names & set(ROLE_SETTINGS):
            names |= {"lr", *_settings_of_groups(values)}
            names |= _settings_of_groups(stored_values)
        yield role, names


def _settings_of_groups(optimizer: Mapping[str, Any]) -> set[str]:
    """Returns the names of the settings that parameter groups have."""
    return {
        name
        for group in optimizer.get("groups", ())
        for settings in group.values()
        for name in settings
    }


def apply_changed_settings(
    learner: Learner,
    recipe: Recipe,
    stored: Mapping[str, Any] | None,
    configured: Sequence[Sequence[dict[str, Any]]],
) -> None:
    """Gives optimizers the recipe's value of every setting that differs from the checkpoint's.

    Args:
        learner: A learner that has loaded the checkpoint.
        recipe: The recipe of the resumed training.
        stored: The settings at the checkpoint; None if an earlier version wrote it, which recorded
            none.
        configured: The parameter groups of every optimizer as the recipe made them.
    """
    # Without recorded settings, those of the checkpoint stay.
    changed = {} if stored is None else dict(changed_by_role(stored, recipe))
    for (role, optimizer), groups in zip(learner.optimizers(), configured, strict=True):
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            for name in changed.get(role, set()) & new.keys() - {"params"}:
                set_group_value(group, name, new[name])


def set_group_value(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets an optimizer setting of a parameter group."""
    # A captured graph reads a setting that is a tensor from its memory.
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(float(value))
    else:
        group[name] = value


def refuse_other_classes(trained: Sequence[str] | None, present: Sequence[str]) -> None:
    """Raises a UsageError if labels have another meaning than in the training.

    Args:
        trained: The names of the classes in the checkpoint; None or empty if it has none.
        present: The names of the classes of the source.
    """
    # A model predicts numbers of classes, so their order matters.
    if not trained or list(trained) == list(present):
        return
    if len(trained) != len(present):
        change = (
            f"the model was trained with {len(trained)} classes, "
            f"and the data have {len(present)}"
        )
    else:
        pairs = enumerate(zip(trained, present, strict=True))
        number = next(number for number, (old, new) in pairs if old != new)
        change = (
            f"class {number} was '{trained[number]}' when the model was trained, "
            f"and is '{present[number]}' now"
        )
    raise UsageError(f"data: {change}; restore the names, or train again")
