"""The face of the UAV simulator: settings only, nothing heavy."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import Config, Objective, SourceOutline

from ..simulator_config import SimulatorConfig

Coefficient = Annotated[float, Field(allow_inf_nan=False)] | None


OBSERVATION_SIZE = 7
ACTION_SIZE = 2
SHORT_EPISODES = (9, 25, 60)
"""Steps of an episode in each of the other sizes; the last allows to reach goal and obstacle."""
EVALUATED_STEPS = 200
"""Steps of an evaluated episode in the last of these sizes."""


class RewardConfig(Config):
    """Coefficients of the reward: a preset, and whatever should differ from it."""

    preset: Literal["seed", "v0_1", "v0_2"] = "v0_2"
    """Where coefficients come from that are not given; ``v0_2`` pulls hardest to the goal and
    into formation.
    """
    collision: Coefficient = None
    """Leader, once: nearer than 20 to the obstacle; the episode ends."""
    obstacle: Coefficient = None
    """Every agent, each step nearer than 40 to the obstacle."""
    border: Coefficient = None
    """Every agent, each step within 50 of the border of the field."""
    goal: Coefficient = None
    """Leader, once: nearer than 40 to the goal; the episode ends with success."""
    goal_distance: Coefficient = None
    """Leader, each other step: times its distance to the goal."""
    formation: Coefficient = None
    """Leader and follower, each step out of formation: times the distance between them."""
    speed_match: Coefficient = None
    """Leader and follower, each step nearer than 50 with speeds that differ by less than 1."""
    step: Coefficient = None
    """Every agent, each step."""


class UavConfig(SimulatorConfig):
    """A leader flies to a goal around an obstacle and its followers keep formation; all
    simulations are one batch.

    Observations are 7 numbers for each agent, actions are acceleration and turn in [-1, 1]. An
    episode ends when the leader reaches the goal or hits the obstacle, or is cut off at
    ``episode_limit``. Evaluation reports ``success_rate``, ``collision_rate``, ``timeout_rate``,
    ``steps_to_goal``, ``return`` (the leader's), ``formation_rate`` and ``formation_strict``.
    Runs on the device of the recipe, CPU or GPU.
    """

    kind: ClassVar[str] = "uav_path_planning"
    implementation = ".source:UavSource"
    headline: ClassVar[tuple[str, ...]] = (
        "success_rate",
        "return",
        "formation_rate",
        "formation_strict",
        "steps_to_goal",
    )
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "*_rate": (0, 1),
        "formation_strict": (0, 1),
        "steps_to_goal": (0, math.inf),
    }
    objective = Objective("return", "maximize")
    pictures: ClassVar[tuple[str, ...]] = (".gif", ".png")
    fixed: ClassVar[frozenset[str]] = SimulatorConfig.fixed | {
        "repeat_failures"
    }

    followers: int = Field(default=3, ge=1)
    """Agents that follow the one leader."""
    episode_limit: int = Field(default=1000, ge=1)
    """Steps after which an episode is truncated."""
    training_limit: Annotated[int, Field(ge=1)] | None = None
    """Steps after which an episode that is learned from is truncated, if that is sooner;
    evaluation does not use it.
    """
    repeat_failures: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the training episodes that start like one of the last 64 that failed."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Coefficients of the agents' rewards."""
    legacy_timing: bool = False
    """Judge the state before the action instead of the one after it, as older simulators did; for
    comparison only.
    """

    def other_sizes(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yields sizes with one follower more or less, and with short episodes."""
        few, single, usual = super().other_sizes(batch_size)
        short, medium, long = (
            min(limit, self.episode_limit) for limit in SHORT_EPISODES
        )
        yield {**few, "followers": self.followers + 1, "episode_limit": short}
        yield {
            **single,
            "followers": max(1, self.followers - 1),
            "episode_limit": medium,
        }
        # Evaluated episodes have a higher limit, so that some of them end long before others.
        limits = {
            "training_limit": long,
            "episode_limit": min(EVALUATED_STEPS, self.episode_limit),
        }
        yield {**usual, **limits, "evaluation.episodes": 64}

    def outline(self, batch_size: int) -> SourceOutline:
        """Returns the shapes of transitions of the leader and its followers."""
        return self.transitions(
            batch_size, 1 + self.followers, OBSERVATION_SIZE, ACTION_SIZE
        )
