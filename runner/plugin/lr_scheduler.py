"""Schedules of learning rates: functions of the progress; some react to evaluations, too."""

import math
from abc import ABC
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from runner.plugin.contract import Objective
from runner.plugin.plugin_config import PluginConfig
from runner.plugin.schedule_state import NoState
from runner.plugin.watched_metric import Direction, watched_metric

WARMUP_START = 0.01
"""Factor at the start of a warm-up; with zero, the first update would be lost."""


class ScheduleConfig(PluginConfig, ABC):
    """The settings of a schedule; the docstring is its card.

    Override ``after_warmup``, or ``multiplier`` if the schedule has another warm-up or none. A
    schedule that reacts to evaluations names a ``ScheduleState`` as its implementation.
    """

    implementation: ClassVar[str | type[Any]] = NoState

    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training in which the learning rate rises linearly from 1 % to all of it."""

    def multiplier(self, fraction: float) -> float:
        """Returns the factor of the learning rate after a share of the training, 0 to 1."""
        if fraction < self.warmup:
            return WARMUP_START + (1 - WARMUP_START) * fraction / self.warmup
        return self.after_warmup((fraction - self.warmup) / (1 - self.warmup))

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up, by the share of the remaining training."""
        return 1.0

    @property
    def reacts_to_evaluations(self) -> bool:
        """Whether evaluations change learning rates, too."""
        return self.implementation is not NoState

    def watched(self, objective: Objective | None) -> tuple[str, Direction] | None:
        """Returns the metric that is compared, without ``eval/``, and its direction; None if there
        is none.

        Args:
            objective: That of the recipe.
        """
        return None

    def contradictions(self, objective: Objective | None) -> Iterator[tuple[str, str]]:
        """Yields pairs of a setting and a problem with the rest of the recipe.

        Args:
            objective: That of the recipe.
        """
        return iter(())


class ConstantConfig(ScheduleConfig):
    """A constant learning rate, after a warm-up."""

    kind: ClassVar[str] = "constant"


class LinearConfig(ScheduleConfig):
    """Falls linearly."""

    kind: ClassVar[str] = "linear"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        return 1 - (1 - self.floor) * fraction


class CosineConfig(ScheduleConfig):
    """Falls along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without
    restarts).
    """

    kind: ClassVar[str] = "cosine"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * fraction)) / 2


class StepConfig(ScheduleConfig):
    """Falls in steps."""

    kind: ClassVar[str] = "step"
    every: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the training after the warm-up between two steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The factor of the learning rate at each step."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        # A sum of shares may be below a step by its rounding.
        steps = math.floor(fraction / self.every + 1e-9)
        return float(self.gamma**steps)


class OneCycleConfig(ScheduleConfig):
    """Rises and falls along half cosines (Smith and Topin 2018, arXiv:1708.07120); the optimizer's
    is the highest.
    """

    kind: ClassVar[str] = "one_cycle"
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the training after the warm-up at which the learning rate is highest."""
    start: Annotated[float, Field(gt=0, le=1)] = 0.04
    """Share of the highest learning rate at the beginning."""
    floor: Annotated[float, Field(ge=0, le=1)] = 4e-6
    """Share of the highest learning rate that is left in the end."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        if fraction < self.peak:
            low = self.start
            distance = 1 - fraction / self.peak
        else:
            low = self.floor
            distance = (fraction - self.peak) / (1 - self.peak)
        return low + (1 - low) * (1 + math.cos(math.pi * distance)) / 2


class PolynomialConfig(ScheduleConfig):
    """Falls with a power of the share of the training that is left."""

    kind: ClassVar[str] = "polynomial"
    power: Annotated[float, Field(gt=0, le=10)] = 2.0
    """The power; 1 is a linear decay."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        return float(self.floor + (1 - self.floor) * (1 - fraction) ** self.power)


class CosineRestartsConfig(ScheduleConfig):
    """Falls along half a cosine several times (Loshchilov and Hutter 2017, arXiv:1608.03983,
    equation 5).
    """

    kind: ClassVar[str] = "cosine_restarts"
    cycles: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of cycles; each begins with the complete learning rate."""
    growth: Annotated[float, Field(ge=1, le=10)] = 2.0
    """How many times as long as its predecessor a cycle is."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left at the end of a cycle."""

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        lengths = [self.growth**number for number in range(self.cycles)]
        start = 0.0
        for length in lengths[:-1]:
            end = start + length / sum(lengths)
            # A sum of shares is rounded: an update at the end of a cycle begins the next one.
            if fraction < end - 1e-9:
                break
            start = end
        else:
            end = 1.0
        share = min(1.0, max(0.0, (fraction - start) / (end - start)))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


class InverseSqrtConfig(ScheduleConfig):
    """Falls with the inverse square root of the updates after a warm-up (Vaswani et al. 2017,
    section 5.3).
    """

    kind: ClassVar[str] = "inverse_sqrt"
    warmup: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the training in which the learning rate rises linearly from 1 % to all of it; after
    four times as long, half of it is left.
    """

    def after_warmup(self, fraction: float) -> float:
        """Returns the factor after the warm-up."""
        return math.sqrt(self.warmup / (self.warmup + fraction * (1 - self.warmup)))


class PlateauConfig(ScheduleConfig):
    """Falls when a metric of evaluations has stopped improving, as ``ReduceLROnPlateau`` of torch
    with an absolute threshold.

    When it helps: the length of the training that a model needs is not known. When it hurts: a
    metric that is noisy reduces the learning rates too early.
    """

    kind: ClassVar[str] = "plateau"
    implementation = "runner.plugin.plateau:Plateau"

    metric: Annotated[str, Field(pattern=r"^eval/\S+$")] | None = None
    """The metric, such as eval/loss; null is the objective."""
    direction: Direction | None = None
    """Whether less or more of the metric is better; null is the objective's direction."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The factor of the learning rates at each reduction."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Evaluations without an improvement that are tolerated; one more reduces learning rates."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Least difference to the best value that is an improvement; a tie is none."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Evaluations after a reduction that do not count."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate below which no parameter group falls."""

    def watched(self, objective: Objective | None) -> tuple[str, Direction] | None:
        """Returns the metric without ``eval/`` and its direction; None if one is unknown."""
        return watched_metric(self.metric, self.direction, objective)

    def contradictions(self, objective: Objective | None) -> Iterator[tuple[str, str]]:
        """Yields the setting that a metric or its direction is missing in."""
        if self.watched(objective) is not None:
            return
        if self.metric is None and objective is None:
            yield (
                "kind",
                "there is no objective here: set metric, for instance eval/loss, and direction",
            )
        else:
            yield (
                "metric",
                "is not the objective: set direction to minimize or maximize",
            )


SCHEDULES: dict[str, type[ScheduleConfig]] = {
    config.kind: config
    for config in (
        ConstantConfig,
        LinearConfig,
        CosineConfig,
        StepConfig,
        OneCycleConfig,
        PolynomialConfig,
        CosineRestartsConfig,
        InverseSqrtConfig,
        PlateauConfig,
    )
}
"""The schedules that every recipe can name, by kind."""
