"""Experiments for ablations: an experiment file, or a recipe with the default settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from runner.ablation.time_forecast import PROCESSES
from runner.distributed.refusals import refuse_recipe
from runner.plugin.config import Config
from runner.plugin.registry import Registry
from runner.recipe.loader import fill_experiment, find, load, load_named
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import Problem, RecipeError, read
from runner.system.suggestions import suggestion
from runner.training.budget import fitted
from runner.verify.variants import GROUPS, Group, names

if TYPE_CHECKING:
    from collections.abc import Callable

KIND: Final = "ablation"
# More rounds add little, because a process keeps its speed; fewer do not repay the start.
ROUNDS_A_PROCESS = 4
Assignments = list[Annotated[str, Field(min_length=1)]]


class CaseConfig(Config):
    """Describes one setting of the recipe."""

    set: Assignments = Field(default_factory=list)
    """Assignments ``a.b.c=VALUE``, after those for all cases."""
    published: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Published ratios by variant, which are displayed next to the measured ones."""


class RoundsConfig(Config):
    """Sets how often every variant is measured."""

    least: Annotated[int, Field(ge=3)] = 20
    """Rounds before the wanted precision counts, in five processes at least."""
    most: Annotated[int, Field(ge=3)] = 60
    """Rounds after which a case is done anyway."""

    @model_validator(mode="after")
    def _ordered(self) -> RoundsConfig:
        if self.least > self.most:
            raise ValueError(f"least, {self.least}, is more than most, {self.most}")
        return self

    @property
    def a_process(self) -> int:
        """Returns the rounds after which every process is replaced: four, or fewer if there would
        be fewer than five processes.
        """
        return max(1, min(ROUNDS_A_PROCESS, self.most // PROCESSES))


class AblationConfig(Config):
    """An ablation: what every stage of a recipe is worth."""

    kind: Literal["ablation"]
    """Marks this file as an ablation."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the result's folder and its run in MLflow."""
    recipe: Annotated[str, Field(min_length=1)]
    """A recipe, as seen from this file's folder, or the bare name of one that ships; its stages
    are compared.
    """
    set: Assignments = Field(default_factory=list)
    """Assignments ``a.b.c=VALUE`` for all cases."""
    cases: dict[str, CaseConfig] = Field(
        default_factory=lambda: {"": CaseConfig()}, min_length=1
    )
    """Settings of the recipe by name, measured one after the other."""
    variants: list[Group] = Field(default_factory=lambda: list(GROUPS), min_length=1)
    """The sets of stages to compare: each alone, phases cumulatively, all
    together, all without each, and those that a training script usually has.
    """
    processes: Annotated[int, Field(ge=1)] = 1
    """Number of processes on this machine that train together. Of several, the baseline in one
    process is measured, too, and the bytes that they send.
    """
    budget: Annotated[float, Field(gt=0)] = 900.0
    """Seconds for all cases together; variants that are not measured by then are
    reported as missing.
    """
    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Half the width of a ratio's 95 % interval, relative, that is good enough."""
    rounds: RoundsConfig = RoundsConfig()
    """Limits on the number of rounds."""
    published_by: str = ""
    """Where the published ratios come from."""


@dataclass(frozen=True)
class Case:
    """Describes one setting to measure."""

    name: str
    """Name of the case; empty if there is only one."""
    recipe: Recipe
    sets: tuple[str, ...]
    """The assignments that lead from the recipe's file to it."""
    published: dict[str, float]


@dataclass(frozen=True)
class Experiment:
    """A validated ablation."""

    path: Path
    """The experiment's file, or the recipe's."""
    config: AblationConfig
    cases: tuple[Case, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides what is measured; budget and precision do not."""
        parts: list[Any] = [
            self.config.name,
            sorted(self.config.variants),
            [[c.name, c.recipe.digest] for c in self.cases],
        ]
        # Ablations in one process can still be continued that have no such number.
        if self.config.processes > 1:
            parts.append(self.config.processes)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load_experiment(
    reference: str | Path,
    sets: Sequence[str],
    catalog: Registry,
    budget: float | None = None,
    processes: int | None = None,
) -> Experiment:
    """Reads and validates an experiment file, or a recipe, which is then measured with default
    settings.

    Assignments follow those of the file; a budget and a number of processes replace those of the
    file.

    Raises:
        RecipeError: All mistakes with their lines.
        UsageError: Several processes cannot train a case.
    """
    path = find(reference)
    problems = list[Problem]()
    root = read(path, problems)
    if root.get("kind") is None:
        recipe = load(path, sets, catalog)
        config = AblationConfig(kind=KIND, name=recipe.name, recipe=str(path))
        cases = [Case("", recipe, tuple(sets), {})]
    else:
        config = fill_experiment(AblationConfig, KIND, "ablated", root, problems)
        cases = []
        for name, case_config in config.cases.items():
            assignments = (*root.items("set"), *root.items("cases", name, "set"))
            try:
                recipe = load_named(
                    root.get("recipe") or root, (*assignments, *sets), catalog
                )
            # The problems of all cases are reported together.
            except RecipeError as error:
                problems += error.problems
                continue
            cases.append(
                Case(
                    name,
                    recipe,
                    (*config.set, *case_config.set, *sets),
                    case_config.published,
                )
            )
            variant_names = names(recipe)
            for variant in case_config.published.keys() - variant_names:
                location = (
                    root.get("cases", name, "published", variant) or root
                ).anchor
                message = f"no variant of that name{suggestion(variant, variant_names)}"
                problems.append(
                    Problem(location, f"cases.{name}.published.{variant}", message)
                )
    given = {"budget": budget, "processes": processes}
    config = config.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    has_stages = all(case.recipe.stages for case in cases)
    # Several processes are compared with one even without stages.
    if not problems and not has_stages and config.processes == 1:
        location = (root.get("recipe") or root).place
        problems.append(
            Problem(
                location,
                "optimization",
                "no stage is switched on, so there is nothing to compare",
            )
        )
    if problems:
        raise RecipeError(problems)
    if config.processes > 1:
        for case in cases:
            refuse_recipe(case.recipe, config.processes)
    return Experiment(path, config, tuple(cases))


def keep_budgets(
    experiment: Experiment, registry: Registry, say: Callable[[str], object]
) -> Experiment:
    """Returns the experiment with the recipes that a training of its cases would have.

    A ``train.memory_budget`` with ``fit`` switches on stages, which are then measured, too.

    Args:
        experiment: The experiment.
        registry: Contains the plugins.
        say: Receives a line about stages that were switched on.

    Raises:
        RecipeError: The plan of a case exceeds its budget.
    """
    cases = [
        replace(case, recipe=fitted(case.recipe, registry, say))
        for case in experiment.cases
    ]
    return replace(experiment, cases=tuple(cases))
