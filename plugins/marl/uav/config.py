"""The face of the UAV simulator: settings only, nothing heavy."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import Config, Objective, SourceOutline

from ..simulator_config import SimulatorConfig

Coefficient = Annotated[float, Field(allow_inf_nan=False)] | None


OBSERVATION_SIZE = 7
"""Numbers that an agent observes of itself and of the scene."""
OBSTACLE_SIZE = 4
"""Numbers that it observes of each obstacle that moves or is one of several."""
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
    """Leader, once: nearer than 20 to an obstacle; the episode ends."""
    obstacle: Coefficient = None
    """Every agent, each step nearer than 40 to an obstacle."""
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


class ObstaclesConfig(Config):
    """Number and motion of the obstacles.

    A single obstacle that does not move is near x = 350. All others start at uniformly
    distributed positions in the band between starts and goals (y 240 to 460 over the width of
    the field), at least 40 away from every start and every goal, and never leave it. At most 16
    are allowed: side by side they leave a gap for the leader.
    """

    count: int = Field(default=1, ge=1, le=16)
    """Obstacles of a simulation."""
    speed: Annotated[float, Field(ge=0, le=40)] = 0.0
    """Distance that an obstacle moves in each step; leaders fly 10 to 20, followers up to 40."""
    turn: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability with which a moving obstacle takes a new random direction in a step."""
    observed: int = Field(default=3, ge=1)
    """Nearest obstacles that every agent observes, with relative positions and velocities; all
    if there are fewer. A single one that does not move is not observed.
    """

    @property
    def are_random(self) -> bool:
        """Whether obstacles start at random positions and are observed."""
        return self.count > 1 or self.speed > 0


class UavConfig(SimulatorConfig):
    """A leader flies to a goal around obstacles and its followers keep formation; all
    simulations are one batch.

    Observations are 7 numbers for each agent, and 4 more for each observed obstacle if
    ``obstacles`` has several or moving ones. Actions are acceleration and turn in [-1, 1]. An
    episode ends when the leader reaches the goal or hits an obstacle, or is cut off at
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
        "repeat_failures",
        "obstacles",
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
    obstacles: ObstaclesConfig = Field(default_factory=ObstaclesConfig)
    """Number and motion of the obstacles."""
    legacy_timing: bool = False
    """Judge the state before the action instead of the one after it, as older simulators did; for
    comparison only.
    """

    @property
    def observation_size(self) -> int:
        """Numbers that an agent observes."""
        obstacles = self.obstacles
        if not obstacles.are_random:
            return OBSERVATION_SIZE
        observed = min(obstacles.count, obstacles.observed)
        return OBSERVATION_SIZE + OBSTACLE_SIZE * observed

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
            batch_size, 1 + self.followers, self.observation_size, ACTION_SIZE
        )
