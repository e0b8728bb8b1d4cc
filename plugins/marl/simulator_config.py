"""What every simulator can be told: how many copies run, what remembers them and how they are evaluated."""

from typing import ClassVar

from pydantic import Field

from runner.api import Config, SourceConfig

from .replay.config import ReplayConfig, UniformConfig


class EvaluationConfig(Config):
    """How the deterministic policy is measured."""

    episodes: int = Field(default=200, ge=1)
    """Episodes of one evaluation; they run side by side, one in each simulation."""
    seed: int = Field(default=20_011, ge=0)
    """Seed of the held-out episodes: the same ones at every evaluation, whatever the recipe's own seed."""


class SimulatorConfig(SourceConfig):
    """A multi-agent simulator with a replay buffer."""

    provides: ClassVar[str] = "multi_agent"
    simulates: ClassVar[bool] = True

    envs: int = Field(default=16, ge=1)
    """Parallel simulations; one step of all of them counts as this many environment steps."""
    replay: ReplayConfig = Field(default_factory=UniformConfig)
    """What remembers the transitions and draws batches from them."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How the deterministic policy is measured."""

    def largest_batch(self) -> int:
        """No more than the replay buffer holds."""
        return self.replay.capacity
