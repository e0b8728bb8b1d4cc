"""What every recipe can say, whatever plugins it names."""

from typing import Annotated

from pydantic import Field

from runner.config import Config

Count = Annotated[int, Field(ge=1)]


class Head(Config):
    """The keys of a recipe that stand in no section."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run in MLflow and its folder: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Every random number of the run follows from it."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where to train: auto (the first GPU, or else the CPU), cpu, cuda, or cuda:N."""


class TrainConfig(Config):
    """How long to train and how often to look.

    A simulator is trained for ``env_steps``, a dataset for ``updates``; everything that is counted here is counted in
    the same unit.
    """

    env_steps: Count | None = None
    """Environment steps to train for; needed if the data come from a simulator."""
    updates: Count | None = None
    """Updates to train for; needed if the data come from a dataset."""
    batch_size: Count = 128
    """Samples of one update."""
    updates_per_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Updates for every environment step (simulators only)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    """Environment steps with random actions before the first update (simulators only)."""
    evaluate_every: Count | None = None
    """Environment steps (or updates) between two evaluations; null evaluates at the end only."""
    checkpoint_every: Count | None = None
    """Environment steps (or updates) between two checkpoints; null saves at the end only."""
    preemptible: bool = False
    """Whether SIGTERM and SIGINT end the run with exit code 75, which tells a scheduler to resume it."""
    log_every: Count = 1000
    """Environment steps (or updates) between two points of a training metric."""

    @staticmethod
    def unused(simulates: bool) -> tuple[str, ...]:
        """The keys that mean nothing for a simulator, or for a dataset."""
        return ("updates",) if simulates else ("env_steps", "updates_per_step", "warmup_steps")


class TrackingConfig(Config):
    """Where the run is kept in MLflow."""

    experiment: Annotated[str, Field(min_length=1)] = "default"
    """The MLflow experiment that the run belongs to."""
    system_metrics: bool = True
    """Whether processor, memory and GPU use are sampled while training."""
