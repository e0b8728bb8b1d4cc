"""Learning rates as a function of the progress, so that schedules have no state to resume."""

import math
from typing import Annotated, Literal

from pydantic import Field

from runner.plugin.config import Config

WARMUP_START = 0.01
"""Factor at the start of a warm-up; with zero, the first update would be lost."""


class _Schedule(Config):
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training in which the learning rate rises linearly from 1 % to all of it."""

    def factor(self, fraction: float) -> float:
        """Returns the factor of the learning rate after a share of the training, 0 to 1."""
        if fraction < self.warmup:
            return WARMUP_START + (1 - WARMUP_START) * fraction / self.warmup
        return self._after((fraction - self.warmup) / (1 - self.warmup))

    def _after(self, fraction: float) -> float:
        """Returns the factor after the warm-up, by the share of the remaining training."""
        return 1.0


class ConstantConfig(_Schedule):
    """A constant learning rate, after a warm-up."""

    kind: Literal["constant"] = "constant"
    """Constant."""


class LinearConfig(_Schedule):
    """Falls linearly."""

    kind: Literal["linear"] = "linear"
    """Linear decay."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def _after(self, fraction: float) -> float:
        return 1 - (1 - self.floor) * fraction


class CosineConfig(_Schedule):
    """Falls along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without
    restarts).
    """

    kind: Literal["cosine"] = "cosine"
    """Cosine decay."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def _after(self, fraction: float) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * fraction)) / 2


class StepConfig(_Schedule):
    """Falls in steps."""

    kind: Literal["step"] = "step"
    """Step decay."""
    every: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the training after the warm-up between two steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The factor of the learning rate at each step."""

    def _after(self, fraction: float) -> float:
        # A sum of shares may be below a step by its rounding.
        steps = math.floor(fraction / self.every + 1e-9)
        return float(self.gamma**steps)


class OneCycleConfig(_Schedule):
    """Rises and falls along half cosines (Smith and Topin 2018, arXiv:1708.07120); the optimizer's
    is the highest.
    """

    kind: Literal["one_cycle"] = "one_cycle"
    """One cycle."""
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the training after the warm-up at which the learning rate is highest."""
    start: Annotated[float, Field(gt=0, le=1)] = 0.04
    """Share of the highest learning rate at the beginning."""
    floor: Annotated[float, Field(ge=0, le=1)] = 4e-6
    """Share of the highest learning rate that is left in the end."""

    def _after(self, fraction: float) -> float:
        if fraction < self.peak:
            low = self.start
            distance = 1 - fraction / self.peak
        else:
            low = self.floor
            distance = (fraction - self.peak) / (1 - self.peak)
        return low + (1 - low) * (1 + math.cos(math.pi * distance)) / 2


class PolynomialConfig(_Schedule):
    """Falls with a power of the share of the training that is left."""

    kind: Literal["polynomial"] = "polynomial"
    """Polynomial decay."""
    power: Annotated[float, Field(gt=0, le=10)] = 2.0
    """The power; 1 is a linear decay."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left in the end."""

    def _after(self, fraction: float) -> float:
        return float(self.floor + (1 - self.floor) * (1 - fraction) ** self.power)


class CosineRestartsConfig(_Schedule):
    """Falls along half a cosine several times (Loshchilov and Hutter 2017, arXiv:1608.03983,
    equation 5).
    """

    kind: Literal["cosine_restarts"] = "cosine_restarts"
    """Cosine decay with warm restarts."""
    cycles: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of cycles; each begins with the complete learning rate."""
    growth: Annotated[float, Field(ge=1, le=10)] = 2.0
    """How many times as long as its predecessor a cycle is."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left at the end of a cycle."""

    def _after(self, fraction: float) -> float:
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


class InverseSqrtConfig(_Schedule):
    """Falls with the inverse square root of the updates after a warm-up (Vaswani et al. 2017,
    section 5.3).
    """

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    """Decay with the inverse square root."""
    warmup: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the training in which the learning rate rises linearly from 1 % to all of it; after
    four times as long, half of it is left.
    """

    def _after(self, fraction: float) -> float:
        return math.sqrt(self.warmup / (self.warmup + fraction * (1 - self.warmup)))


Schedule = (
    ConstantConfig
    | LinearConfig
    | CosineConfig
    | StepConfig
    | OneCycleConfig
    | PolynomialConfig
    | CosineRestartsConfig
    | InverseSqrtConfig
)
LrSchedulerConfig = Annotated[Schedule, Field(discriminator="kind")]
