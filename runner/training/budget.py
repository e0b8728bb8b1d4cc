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
_MOST_PLANS = 40
"""Sets of stages that are planned before the search for one that fits ends."""


@dataclass(frozen=True)
class StageChoice:
    """A stage that would save memory, with its settings.

    Attributes:
        config: Its settings.
        choice: What it costs.
        is_statistical: Whether results are other ones with it.
    """

    config: StageConfig
    choice: MemoryChoice
    is_statistical: bool

    def text(self) -> str:
        """Returns the stage with its settings and its cost."""
        settings = ", ".join(
            f"{name}: {value}" for name, value in self.choice.settings.items()
        )
        kind = self.config.kind
        return (
            f"{kind}: {{{settings}}} ({self.choice.cost})"
            if settings
            else f"{kind} ({self.choice.cost})"
        )


@dataclass(frozen=True)
class Fitted:
    """A recipe that keeps to its budget.

    Attributes:
        recipe: With the stages that were switched on.
        notes: What was done, for a person.
    """

    recipe: Recipe
    notes: tuple[str, ...] = ()


def keep_budget(recipe: Recipe, registry: Registry) -> Fitted:
    """Returns the recipe if its plan keeps to ``train.memory_budget``, or one with stages that make it do so.

    No stage is added to the recipe of a lock: its stages were chosen when the lock was written.

    Raises:
        RecipeError: The plan exceeds the budget. The message has the plan's table.
    """
    budget = recipe.train.memory_budget
    if budget is None:
        return Fitted(recipe)
    from runner.training.planning import plan_memory

    plan = plan_memory(recipe, registry.files)
    if plan.peak <= budget.limit:
        return Fitted(recipe)
    if not budget.fit or is_lock(recipe.path):
        hint = (
            "lower train.batch_size, or set train.memory_budget: {size: ..., fit: true}"
        )
        raise _refusal(recipe, plan, hint)
    # Stages save activations and gradients; every plan of a set of them costs about a second.
    if plan.resident > budget.limit:
        hint = f"parameters and optimizers alone take {format_size(plan.resident)}; make the model smaller"
        raise _refusal(recipe, plan, hint)
    smallest = plan
    for choices in itertools.islice(_sets(recipe, registry), _MOST_PLANS):
        candidate = with_stages(recipe, choices)
        try:
            fitted_plan = plan_memory(candidate, registry.files)
        except RunnerError:  # a stage that cannot work with this learner
            continue
        if fitted_plan.peak <= budget.limit:
            return Fitted(candidate, _notes(plan, fitted_plan, choices))
        if fitted_plan.peak < smallest.peak:
            smallest = fitted_plan
    stages = ", ".join(smallest.stages) or "no stage"
    hint = f"the least that was found is {format_size(smallest.peak)}, with {stages}; lower train.batch_size"
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
    stages = dict(
        sorted(
            {**recipe.stages, **added}.items(),
            key=lambda item: (item[1].phase, item[0]),
        )
    )
    place = Place(PATH)
    origins = dict(recipe.origins)
    for choice in choices:
        path = f"optimization.{choice.config.kind}"
        origins[path] = place
        origins |= {f"{path}.{name}": place for name in choice.choice.settings}
    off = tuple(kind for kind in recipe.off if kind not in added)
    return replace(recipe, stages=stages, off=off, origins=origins)


def _sets(recipe: Recipe, registry: Registry) -> Iterator[tuple[StageChoice, ...]]:
    """Yields sets of stages, the cheapest first: those that keep results, then the fastest, then the smallest."""
    choices = stage_choices(recipe, registry)
    options: list[list[StageChoice | None]] = [
        [None, *of_stage] for of_stage in choices.values()
    ]
    sets = [
        tuple(filter(None, combination)) for combination in itertools.product(*options)
    ]

    def cost(combination: tuple[StageChoice, ...]) -> tuple[bool, float, int]:
        is_statistical = any(choice.is_statistical for choice in combination)
        return (
            is_statistical,
            math.prod(choice.choice.time for choice in combination),
            len(combination),
        )

    yield from sorted(filter(None, sets), key=cost)


def stage_choices(
    recipe: Recipe, registry: Registry
) -> Mapping[str, list[StageChoice]]:
    """Returns the ways in which each stage could save memory that the recipe does not switch on."""
    from runner.training.pipeline import resolve_device, setting_of

    setting = setting_of(recipe, resolve_device(recipe.device))
    claimed = frozenset[str]().union(
        *(stage.claims for stage in recipe.stages.values())
    )
    choices = {}
    for kind in registry.kinds("optimization"):
        if kind in recipe.stages:
            continue
        stage_class = registry.get("optimization", kind)
        memory_choices = stage_class.memory_choices(recipe.train.batch_size)
        configs = [
            (stage_class(**choice.settings), choice) for choice in memory_choices
        ]
        found = [
            StageChoice(
                config, choice, isinstance(config.contract(setting), Statistical)
            )
            for config, choice in configs
            if _can_work(config, setting, claimed)
        ]
        if found:
            choices[kind] = found
    return choices


def _can_work(config: StageConfig, setting: Setting, claimed: frozenset[str]) -> bool:
    """Returns whether a stage has an effect here and claims no slot that another stage claims."""
    if config.claims & claimed or any(
        map(setting.model.lacks, config.claims | config.wraps)
    ):
        return False
    try:
        return config.inactive(setting) is None
    except RunnerError:
        return False


def _notes(
    before: MemoryPlan, after: MemoryPlan, choices: Sequence[StageChoice]
) -> tuple[str, ...]:
    sizes = f"{format_size(before.peak)} -> {format_size(after.peak)}"
    time = math.prod(choice.choice.time for choice in choices)
    head = f"{PATH}: {sizes} for an update, expected to take {time:.2f} times as long"
    return (head, *(f"switched on: {choice.text()}" for choice in choices))


def _refusal(recipe: Recipe, plan: MemoryPlan, hint: str) -> RecipeError:
    budget = recipe.train.memory_budget
    assert budget is not None
    origins = recipe.origins
    place = origins.get(PATH) or origins.get(f"{PATH}.size") or DEFAULT
    table = "\n".join(f"    {line}".rstrip() for line in plan.lines())
    message = f"the plan of an update needs {format_size(plan.peak)}, which exceeds {budget.size}: {hint}\n{table}"
    return RecipeError([Problem(place, PATH, message)])
