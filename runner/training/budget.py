"""Trainings that keep to a memory budget."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runner.plugin.contract import Statistical
from runner.plugin.memory_choice import MemoryChoice
from runner.plugin.registry import Registry
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import DEFAULT, Place, Problem, RecipeError, is_lock
from runner.system.byte_size import format_size
from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.memory.plan import MemoryPlan
    from runner.plugin.configs import Setting, StageConfig

PATH = "train.memory_budget"
_log = logging.getLogger(__name__)
# A plan takes about a second; the search for stages that fit ends after this number.
_MOST_PLANS = 40


@dataclass(frozen=True)
class StageChoice:
    """A stage that would save memory, with its settings.

    Attributes:
        config: Its settings.
        choice: Its cost.
        is_statistical: Whether it changes results.
    """

    config: StageConfig
    choice: MemoryChoice
    is_statistical: bool

    def text(self) -> str:
        """Returns the stage with its settings and its cost."""
        stage = self.config.kind
        settings = self.settings_text()
        if settings:
            stage += f": {settings}"
        return f"{stage} ({self.choice.cost})"

    def settings_text(self) -> str:
        """Returns the settings as a YAML mapping; empty if there are none."""
        settings = self.choice.settings.items()
        text = ", ".join(f"{name}: {value}" for name, value in settings)
        return f"{{{text}}}" if text else ""


@dataclass(frozen=True)
class Fitted:
    """A recipe that keeps to its budget.

    Attributes:
        recipe: The recipe, with the stages that were switched on.
        notes: Messages about the changes.
    """

    recipe: Recipe
    notes: tuple[str, ...] = ()


def keep_budget(recipe: Recipe, registry: Registry) -> Fitted:
    """Returns a recipe that keeps to ``train.memory_budget``, with additional stages if necessary.

    No stage is added to the recipe of a lock: its stages were selected when the lock was written.

    Raises:
        RecipeError: The plan exceeds the budget. The message has the plan's table.
    """
    budget = recipe.train.memory_budget
    if budget is None:
        return Fitted(recipe)
    # Few trainings have a budget, and need the modules that plan.
    from runner.training.planning import plan_memory

    plan = plan_memory(recipe, registry.files)
    if plan.peak <= budget.limit:
        return Fitted(recipe)
    if not budget.fit or is_lock(recipe.path):
        hint = (
            "lower train.batch_size, or set train.memory_budget: {size: ..., fit: true}"
        )
        raise _refusal(recipe, plan, hint)
    # Stages save activations and gradients only.
    if plan.resident > budget.limit:
        size = format_size(plan.resident)
        hint = f"parameters and optimizers alone take {size}; make the model smaller"
        raise _refusal(recipe, plan, hint)
    smallest = plan
    for choices in itertools.islice(_sets(recipe, registry), _MOST_PLANS):
        candidate = with_stages(recipe, choices)
        # Some stages cannot work with some learners.
        try:
            fitted_plan = plan_memory(candidate, registry.files)
        except RunnerError:
            continue
        if fitted_plan.peak <= budget.limit:
            return Fitted(candidate, _notes(plan, fitted_plan, choices))
        if fitted_plan.peak < smallest.peak:
            smallest = fitted_plan
    stages = ", ".join(smallest.stages) or "no stage"
    hint = (
        f"the least that was found is {format_size(smallest.peak)}, with {stages}; "
        "lower train.batch_size"
    )
    raise _refusal(recipe, plan, hint)


def fitted(
    recipe: Recipe, registry: Registry, report: Callable[[str], object] | None = None
) -> Recipe:
    """Returns the recipe with the stages that its memory budget needs, and reports them.

    Raises:
        RecipeError: As ``keep_budget``.
    """
    result = keep_budget(recipe, registry)
    for note in result.notes:
        _log.warning(note)
        if report is not None:
            report(note)
    return result.recipe


def with_stages(recipe: Recipe, choices: Sequence[StageChoice]) -> Recipe:
    """Returns the recipe with more stages, in the order in which all attach."""
    added = {choice.config.kind: choice.config for choice in choices}
    merged = {**recipe.stages, **added}
    # Stages attach in the order of their phases.
    kinds = sorted(merged, key=lambda kind: (merged[kind].phase, kind))
    stages = {kind: merged[kind] for kind in kinds}
    origin = Place(PATH)
    origins = dict(recipe.origins)
    for choice in choices:
        path = f"optimization.{choice.config.kind}"
        origins[path] = origin
        origins |= {f"{path}.{name}": origin for name in choice.choice.settings}
    off = tuple(kind for kind in recipe.off if kind not in added)
    return replace(recipe, stages=stages, off=off, origins=origins)


def _sets(recipe: Recipe, registry: Registry) -> Iterator[tuple[StageChoice, ...]]:
    """Yields sets of stages: first those that keep results, then the fastest, then the smallest."""
    choices_by_stage = stage_choices(recipe, registry)
    options: list[list[StageChoice | None]] = [
        [None, *choices] for choices in choices_by_stage.values()
    ]
    combinations = itertools.product(*options)
    sets = [tuple(filter(None, combination)) for combination in combinations]

    def cost(choices: tuple[StageChoice, ...]) -> tuple[bool, float, int]:
        is_statistical = any(choice.is_statistical for choice in choices)
        time = math.prod(choice.choice.time for choice in choices)
        return is_statistical, time, len(choices)

    yield from sorted(filter(None, sets), key=cost)


def stage_choices(
    recipe: Recipe, registry: Registry
) -> Mapping[str, list[StageChoice]]:
    """Returns the stages that could save memory, each with its possible settings.

    Stages that the recipe switches on are not among them.
    """
    from runner.training.pipeline import resolve_device, setting_of

    context = setting_of(recipe, resolve_device(recipe.device))
    claims = (stage.claims for stage in recipe.stages.values())
    claimed = frozenset[str]().union(*claims)
    choices_by_stage = {}
    for kind in registry.kinds("optimization"):
        if kind in recipe.stages:
            continue
        stage_class = registry.get("optimization", kind)
        choices = []
        for memory_choice in stage_class.memory_choices(recipe.train.batch_size):
            config = stage_class(**memory_choice.settings)
            if _can_work(config, context, claimed):
                is_statistical = isinstance(config.contract(context), Statistical)
                choices.append(StageChoice(config, memory_choice, is_statistical))
        if choices:
            choices_by_stage[kind] = choices
    return choices_by_stage


def _can_work(config: StageConfig, context: Setting, claimed: frozenset[str]) -> bool:
    """Returns whether a stage has an effect here and claims no slot that another stage claims."""
    if config.claims & claimed:
        return False
    if any(map(context.model.lacks, config.claims | config.wraps)):
        return False
    # A stage may refuse a combination of settings with an error.
    try:
        return config.inactive(context) is None
    except RunnerError:
        return False


def _notes(
    before: MemoryPlan, after: MemoryPlan, choices: Sequence[StageChoice]
) -> tuple[str, ...]:
    sizes = f"{format_size(before.peak)} -> {format_size(after.peak)}"
    time = math.prod(choice.choice.time for choice in choices)
    summary = (
        f"{PATH}: {sizes} for an update, expected to take {time:.2f} times as long"
    )
    return (summary, *(f"switched on: {choice.text()}" for choice in choices))


def _refusal(recipe: Recipe, plan: MemoryPlan, hint: str) -> RecipeError:
    budget = recipe.train.memory_budget
    assert budget is not None
    origins = recipe.origins
    origin = origins.get(PATH) or origins.get(f"{PATH}.size") or DEFAULT
    table = "\n".join(f"    {line}".rstrip() for line in plan.lines())
    message = (
        f"the plan of an update needs {format_size(plan.peak)}, "
        f"which exceeds {budget.size}: {hint}\n{table}"
    )
    return RecipeError([Problem(origin, PATH, message)])
