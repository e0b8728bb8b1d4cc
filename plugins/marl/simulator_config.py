"""Common settings of simulators: the number of copies, their replay buffer and their evaluation."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import Config, SourceConfig, SourceOutline, TensorOutline, Unit

from .replay.config import ReplayConfig, UniformConfig

FEW_ENVS = 7


class EvaluationConfig(Config):
    """Evaluation of the deterministic policy."""

    episodes: int = Field(default=200, ge=1)
    """Episodes of one evaluation; they run side by side, one in each simulation."""
    longest: int = Field(default=10_000, ge=1)
    """Steps after which an evaluation fails if an episode has not ended."""
    seed: int = Field(default=20_011, ge=0)
    """Seed of the held-out episodes, which are the same at every evaluation, whatever
    the recipe's seed.
    """


class SimulatorConfig(SourceConfig):
    """A multi-agent simulator with a replay buffer."""

    provides: ClassVar[str] = "multi_agent"
    units: ClassVar[frozenset[Unit]] = frozenset(
        {"updates", "samples", "env_steps"}
    )
    division: ClassVar[Literal["rows", "draws"] | None] = "draws"
    evaluation_size: ClassVar[str] = "evaluation.episodes"
    evaluation_seed: ClassVar[str] = "evaluation.seed"
    fixed: ClassVar[frozenset[str]] = frozenset({"envs", "replay", "warmup"})
    moved: ClassVar[Mapping[str, str]] = {
        "train.warmup_steps": "data.warmup",
        "train.updates_per_step": "data.updates_per_step",
    }

    envs: int = Field(default=16, ge=1)
    """Parallel simulations; one step of all of them counts as this many environment steps."""
    replay: ReplayConfig = Field(default_factory=UniformConfig)
    """The replay buffer, which stores transitions and samples batches."""
    warmup: Annotated[int, Field(ge=0)] = 1000
    """Environment steps with random actions before the first update."""
    updates_per_step: Annotated[float, Field(gt=0)] = 0.5
    """Updates for every environment step; with another batch size than the recipe's, as many
    fewer as it is larger.
    """
    normalize_rewards: bool = False
    """Whether every agent's rewards are divided by their root mean square so far, in batches
    only.
    """
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How the deterministic policy is measured."""

    @property
    def depends_on_feedback(self) -> bool:  # type: ignore[override]  # the replay buffer decides
        """Priorities change what is drawn next."""
        return self.replay.kind == "prioritized"

    def largest_batch(self) -> int:
        """No more than the replay buffer holds."""
        return self.replay.capacity

    def indivisible(self, processes: int) -> str | None:
        """Each process needs an environment."""
        if self.envs >= processes:
            return None
        return (
            f"envs: {self.envs} environments cannot be divided among {processes} processes; "
            f"use at least {processes} environments, or fewer processes"
        )

    def transitions(
        self, batch_size: int, agents: int, observation: int, action: int
    ) -> SourceOutline:
        """Returns the outline of a batch from the replay buffer.

        Args:
            batch_size: Transitions.
            agents: How many there are.
            observation: Numbers that an agent observes.
            action: Numbers of an action.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "observation": (agents, observation),
            "action": (agents, action),
            "reward": (agents,),
            "next_observation": (agents, observation),
            "terminated": (),
            "weight": (),
        }
        batch = {
            name: TensorOutline((batch_size, *shape))
            for name, shape in shapes.items()
        }
        return SourceOutline(
            {**batch, "index": TensorOutline((batch_size,), "int64")}
        )

    def other_sizes(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yields a few environments, a single one, and the usual number, each with a small
        buffer.
        """
        # The rows of one step then are at the end of the buffer and at its beginning.
        capacity = max(batch_size, FEW_ENVS) + 1
        capacity += capacity % FEW_ENVS == 0
        yield {
            "envs": FEW_ENVS,
            "evaluation.episodes": 3,
            "replay.capacity": capacity,
            "updates_per_step": 1.2 / FEW_ENVS,
            "warmup": 2 * FEW_ENVS,
        }
        yield {
            "envs": 1,
            "evaluation.episodes": 1,
            "replay.capacity": batch_size,
            "updates_per_step": 0.25,
            "warmup": 3,
        }
        yield {
            "evaluation.episodes": 8,
            "replay.capacity": max(batch_size, 20 * self.envs + 1),
            "updates_per_step": 0.1 / self.envs,
            "warmup": 0,
        }

    def resident(self, device: str) -> bool:
        """Returns whether the replay buffer is where the learner is."""
        return device == "cpu" or self.replay.device == "same"

    def contradictions(
        self, unit: Unit, length: int
    ) -> Iterator[tuple[str, str]]:
        """A warm-up that leaves nothing to learn from."""
        if unit == "env_steps" and self.warmup >= length:
            yield (
                "warmup",
                f"{self.warmup:,} leaves no step to learn in: train.env_steps is {length:,}",
            )
