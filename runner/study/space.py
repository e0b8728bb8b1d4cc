"""The search space: which settings of a recipe exist in a trial, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from runner.recipe.document import dump_inline
from runner.study.config import ParameterConfig

if TYPE_CHECKING:
    from optuna.trial import Trial

STAGES: Final = "optimization"
OFF = "off"
Value = bool | int | float | str | None
"""What Optuna keeps of a parameter."""


@dataclass(frozen=True)
class Parameter:
    """One setting that is searched."""

    path: str
    config: ParameterConfig
    needs: tuple[str, ...] = ()
    """The stages that have to be on in a trial for the setting to exist there."""

    @property
    def stage(self) -> str | None:
        """The stage that it switches, if it does."""
        section, _, kind = self.path.partition(".")
        return kind if section == STAGES and "." not in kind else None

    def suggested(self, trial: Trial) -> Any:
        """The setting that Optuna suggests, or has suggested before the trial was interrupted."""
        config = self.config
        if config.float is not None:
            return trial.suggest_float(self.path, config.float[0], config.float[1], log=config.log, step=config.step)
        if config.int is not None:
            step = int(config.step or 1)
            return trial.suggest_int(self.path, config.int[0], config.int[1], log=config.log, step=step)
        chosen = trial.suggest_categorical(self.path, [label(choice) for choice in config.choice or ()])
        return next(choice for choice in config.choice or () if label(choice) == chosen)

    def has(self, value: Any) -> bool:
        """Whether a number is in the range."""
        low, high = self.config.float or self.config.int or (0, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            return False
        step = self.config.step or (1 if self.config.int is not None else None)
        return step is None or math.isclose((value - low) / step, round((value - low) / step), abs_tol=1e-9)

    def levels(self) -> list[Any]:
        """Values that stand for all others when it is asked what is allowed: every choice, or both ends."""
        return list(self.config.choice or self.config.float or self.config.int or ())

    def __str__(self) -> str:
        config = self.config
        if config.choice is not None:
            return f"one of {', '.join(str(label(choice)) for choice in config.choice)}"
        low, high = config.float or config.int or (0, 0)
        how = ", logarithmic" if config.log else f", in steps of {config.step:g}" if config.step else ""
        return f"{low:g} to {high:g}{how}"


@dataclass(frozen=True)
class Space:
    """All settings that are searched, switches of stages first and none before what it needs."""

    parameters: tuple[Parameter, ...]
    on: frozenset[str]
    """The stages that are on in the recipe."""

    def settle(self, ask: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Decides about every setting that exists.

        Args:
            ask: the value of a setting; asked for those alone whose stages are on.

        Returns:
            Values by path. A stage whose requirements are not met is off.
        """
        on, settled = set(self.on), dict[str, Any]()
        for parameter in self.parameters:
            exists = on.issuperset(parameter.needs)
            if exists:
                settled[parameter.path] = ask(parameter)
            elif parameter.stage is not None:
                settled[parameter.path] = OFF
            if parameter.stage is not None:
                (on.add if is_on(settled[parameter.path]) else on.discard)(parameter.stage)
        return settled

    def find(self, path: str) -> Parameter:
        """The parameter of that path."""
        return next(parameter for parameter in self.parameters if parameter.path == path)

    @property
    def configurations(self) -> float:
        """How many there are, conditions aside; infinite with a range of real numbers."""
        return math.prod(_count(parameter.config) for parameter in self.parameters)


def label(value: Any) -> Value:
    """A choice as Optuna keeps it: a scalar as it is, anything else spelled on one line."""
    return value if isinstance(value, Value) else dump_inline(value)


def figure(value: Any) -> str:
    """A number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Settings as ``--set`` takes them."""
    return [f"{path}={dump_inline(value)}" for path, value in values.items()]


def is_on(value: Any) -> bool:
    """Whether the value of a stage switches it on."""
    return value not in (OFF, False)


def ordered(parameters: Sequence[Parameter], requirements: Mapping[str, Collection[str]]) -> Iterator[Parameter]:
    """The parameters with what they need, none before what it depends on.

    Args:
        parameters: as the file has them.
        requirements: what every stage that is switched or set requires.
    """
    switches = {parameter.stage: parameter for parameter in parameters if parameter.stage is not None}
    done: list[str] = []

    def visit(stage: str) -> Iterator[Parameter]:
        if stage in done:
            return
        done.append(stage)
        for required in requirements[stage]:
            if required in switches:
                yield from visit(required)
        yield Parameter(switches[stage].path, switches[stage].config, tuple(requirements[stage]))

    for stage in switches:
        yield from visit(stage)
    for parameter in parameters:
        if parameter.stage is None:
            section, _, rest = parameter.path.partition(".")
            kind = rest.partition(".")[0]
            yield Parameter(parameter.path, parameter.config, (kind,) if section == STAGES else ())


def _count(config: ParameterConfig) -> float:
    if config.choice is not None:
        return len(config.choice)
    low, high = config.float or config.int or (0, 0)
    if config.float is not None and config.step is None:
        return math.inf
    return 1 + round((high - low) / (config.step or 1))
