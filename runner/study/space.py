"""The search space of a study: its parameters, in an order in which stages precede their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.recipe.dumping import is_same
from runner.study.config import OFF, STAGES, ParameterConfig, label
from runner.system.text_lines import figure

if TYPE_CHECKING:
    from optuna.trial import Trial


@dataclass(frozen=True)
class Parameter:
    """A searched setting."""

    path: str
    config: ParameterConfig
    needs: tuple[str, ...] = ()  # the stages that have to be on in a trial for the setting to exist there

    @property
    def stage(self) -> str | None:
        """The stage that it switches, if it does."""
        section, _, kind = self.path.partition(".")
        return kind if section == STAGES and "." not in kind else None

    def suggested(self, trial: Trial) -> Any:
        """The setting that Optuna suggests, or has suggested before the trial was interrupted."""
        config = self.config
        if config.float is not None:
            return trial.suggest_float(self.path, *config.float, log=config.log, step=config.step)
        if config.int is not None:
            return trial.suggest_int(self.path, *config.int, log=config.log, step=int(config.step or 1))
        labels = [label(choice) for choice in config.levels]
        suggestion = trial.suggest_categorical(self.path, labels)
        pairs = zip(config.levels, labels, strict=True)
        return next(choice for choice, name in pairs if is_same(name, suggestion))


@dataclass(frozen=True)
class Space:
    """The searched settings: switches of stages first, and none before the switches it needs."""

    parameters: Sequence[Parameter]
    on: Collection[str]  # the stages that are on in the recipe

    @classmethod
    def of(
        cls,
        searched: Mapping[str, ParameterConfig],
        requirements: Mapping[str, Collection[str]],
        on: Collection[str],
    ) -> Space:
        """Creates the search space of a file, from the requirements of every stage and the stages
        that are on in the recipe.
        """
        arranged: list[Parameter] = []
        parameters = [Parameter(path, config) for path, config in searched.items()]
        switches = {parameter.stage: parameter for parameter in parameters if parameter.stage is not None}

        def arrange(stage: str) -> None:
            # Removing it first ends the recursion for stages that require each other.
            switch = switches.pop(stage, None)
            if switch is None:
                return
            for required in requirements[stage]:
                arrange(required)
            arranged.append(replace(switch, needs=tuple(requirements[stage])))

        while switches:
            arrange(next(iter(switches)))
        for parameter in parameters:
            if parameter.stage is None:
                section, *keys = parameter.path.split(".")
                # A setting of a stage exists where the stage is on.
                needs = tuple(keys[:1]) if section == STAGES else ()
                arranged.append(replace(parameter, needs=needs))
        return cls(arranged, on)

    @property
    def switches(self) -> dict[str, Parameter]:
        """The parameters that switch a stage, by stage."""
        return {parameter.stage: parameter for parameter in self.parameters if parameter.stage is not None}

    @property
    def configurations(self) -> float:
        """Returns the number of configurations without conditions; infinite with
        a range of real numbers.
        """
        return math.prod(parameter.config.count for parameter in self.parameters)

    def settle(self, ask: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Returns the value of every setting that exists, by path; ``ask`` is called for settings
        whose stages are on.

        A stage whose requirements are not met is off.
        """
        stages_on = set(self.on)
        settled: dict[str, Any] = {}
        for parameter in self.parameters:
            path = parameter.path
            stage = parameter.stage
            if stages_on.issuperset(parameter.needs):
                settled[path] = ask(parameter)
            elif stage is not None:
                settled[path] = OFF

            if stage is None:
                continue
            if is_on(settled[path]):
                stages_on.add(stage)
            else:
                stages_on.discard(stage)
        return settled


def spelled(value: Any) -> str:
    """A setting's value: a number with four digits, anything else as it is."""
    return figure(value) if isinstance(value, float) else str(value)


def short(path: str) -> str:
    """A setting as tables and pictures name it: a stage's without the section that all stages are in."""
    return path.removeprefix(f"{STAGES}.")


def is_on(value: Any) -> bool:
    """Returns whether the value of a stage switches it on."""
    return value not in (OFF, False)
