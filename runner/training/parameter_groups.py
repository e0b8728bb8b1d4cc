"""Checks that the parameter groups of a recipe fit the parameters of its learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from runner.plugin.default_slots import make_optimizer
from runner.plugin.learner import GradientLearner, Learner
from runner.plugin.parameter_groups import (
    blocks_within,
    matching_pattern,
    names_of,
    prefixes,
)
from runner.recipe.yaml_nodes import DEFAULT, Problem, RecipeError
from runner.system.errors import UsageError
from runner.system.suggestions import method_named, nearest
from runner.training.role_checks import complete_optimizers

if TYPE_CHECKING:
    from runner.plugin.optimizer import OptimizerSettings
    from runner.recipe.recipe import Recipe

MOST_NAMES = 5
"""Names of parameters in a message."""


def configure_optimizers(recipe: Recipe, learner: Learner) -> None:
    """Makes the optimizers of a learner with the groups of a recipe.

    Raises:
        RecipeError: A pattern matches no parameter, or only those of earlier patterns; torch
            refuses a setting of a group, or weight decay spares all of its parameters; the learner
            has no blocks for ``layer_decay``; or its optimizer was made without the groups.
    """
    divided = {
        role: settings
        for role, settings in recipe.optimizer.items()
        if settings.groups or settings.layer_decay is not None
    }
    problems: list[Problem] = []
    for role, settings in divided.items():
        module = getattr(learner.roles.get(role), "module", None)
        if isinstance(module, nn.Module):
            blocks: Sequence[nn.Module] = ()
            if settings.layer_decay is not None:
                blocks = blocks_within(module, learner.blocks())
            for key, message in _unfit(settings, module, blocks, learner):
                problems.append(_problem(recipe, role, key, message))
    if problems:
        raise RecipeError(problems)

    learner.configure_optimizers()
    complete_optimizers(learner)
    if isinstance(learner, GradientLearner):
        learner.refuse_closures()
    names = {
        (role, group.get("name"))
        for role, optimizer in learner.optimizers()
        for group in optimizer.param_groups
    }
    for role, settings in divided.items():
        if not any(name for group_role, name in names if group_role == role):
            key = "groups" if settings.groups else "layer_decay"
            method = method_named(learner, "configure_optimizers")
            message = f"{method} does not make the groups of role '{role}'; remove the setting"
            problems.append(_problem(recipe, role, key, message))
    if problems:
        raise RecipeError(problems)


def _unfit(
    settings: OptimizerSettings,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    learner: Learner,
) -> Iterator[tuple[str, str]]:
    """Yields the key and the problem of every setting that does not fit a module."""
    if settings.layer_decay is not None and not blocks:
        message = f"{type(learner).__name__}.blocks() has no layer of this role"
        yield "layer_decay", message

    names = list(names_of(module).values())
    patterns = list(settings.groups)
    for number, pattern in enumerate(patterns):
        key = f"groups.{pattern}"
        matches = [aliases for aliases in names if matching_pattern([pattern], aliases)]
        if not matches:
            yield key, f"matches no parameter{_hint(pattern, names)}"
            continue
        earlier = {matching_pattern(patterns[:number], aliases) for aliases in matches}
        if None not in earlier:
            shown = ", ".join(f"'{name}'" for name in patterns if name in earlier)
            yield key, f"is never used: {shown}, which comes first, matches the same"
            continue
        refusal = _refusal(settings, pattern)
        if refusal:
            yield key, refusal
        elif _is_spared_entirely(settings, pattern, module):
            message = "has no effect: spare lists all parameters of the group"
            yield f"{key}.weight_decay", message


def _hint(pattern: str, names: Sequence[Sequence[str]]) -> str:
    """Returns the end of a message about a pattern without a match."""
    first_names = [aliases[0] for aliases in names]
    candidates = {prefix for name in first_names for prefix in prefixes(name)}
    near = nearest(pattern, sorted(candidates))
    if near is not None:
        return f" - did you mean '{near}'?"
    listed = ", ".join(first_names[:MOST_NAMES])
    more = ", ..." if len(first_names) > MOST_NAMES else ""
    return f"; the names are {listed}{more}"


def _refusal(settings: OptimizerSettings, pattern: str) -> str:
    """Returns why torch refuses the settings of a group; empty if it does not.

    An optimizer checks only its own settings, so one is made with those of the group.
    """
    values = settings.settings | settings.groups[pattern].settings
    # Muon accepts matrices only.
    parameter = nn.Parameter(torch.zeros(2, 2))
    try:
        make_optimizer(settings.optimizer(), [parameter], **values)
    except UsageError as error:
        return str(error).removeprefix("optimizer: ")
    return ""


def _is_spared_entirely(
    settings: OptimizerSettings, pattern: str, module: nn.Module
) -> bool:
    """Returns whether no parameter of a group has the weight decay that the group sets."""
    group = settings.groups[pattern]
    if not group.settings.get("weight_decay"):
        return False
    groups = settings.parameter_groups(module)
    # The name of a block may follow the pattern.
    decays = [
        entry["weight_decay"]
        for entry in groups
        if entry["name"].partition("/")[0] == pattern
    ]
    return not any(decays)


def _problem(recipe: Recipe, role: str, key: str, message: str) -> Problem:
    """Returns a problem with the place where the setting of a role was written."""
    paths = (f"optimizer.{role}.{key}", f"optimizer.{key}")
    for path in paths:
        parent = path.rpartition(".")[0]
        origin = recipe.origins.get(path) or recipe.origins.get(parent)
        if origin is not None and origin != DEFAULT:
            return Problem(origin, path, message)
    return Problem(DEFAULT, f"optimizer.{key}", message)
