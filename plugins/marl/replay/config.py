"""Settings of the replay buffer."""

from typing import Annotated, Literal

from pydantic import Field

from runner.api import Config

Capacity = Annotated[int, Field(ge=1)]
Exponent = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Storage(Config):
    capacity: Capacity = 200_000
    """Transitions kept; the oldest are overwritten."""
    device: Literal["same", "cpu"] = "same"
    """Device of the transitions: that of the learner, or host memory for a learner on a GPU."""


class UniformConfig(_Storage):
    """Every transition is equally likely."""

    kind: Literal["uniform"] = "uniform"
    """Uniform replay."""


class PrioritizedConfig(_Storage):
    """A transition is drawn in proportion to a power of its temporal-difference error (Schaul et
    al. 2016).
    """

    kind: Literal["prioritized"] = "prioritized"
    """Proportional prioritized replay."""
    alpha: Exponent = 0.6
    """Power of the priority: 0 is uniform, 1 is proportional to the error."""
    # A YAML list must do for a pair, although the section is strict otherwise.
    beta: Annotated[tuple[Exponent, Exponent], Field(strict=False)] = (0.4, 1.0)
    """Strength of the importance weights at the start and at the end of the training, linear in
    between.
    """
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """Added to every error, so that no transition is lost for ever."""


ReplayConfig = Annotated[
    UniformConfig | PrioritizedConfig, Field(discriminator="kind")
]
"""Either kind of replay buffer, distinguished by ``kind``."""
