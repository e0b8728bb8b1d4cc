"""What every recipe can say, whatever plugins it names."""

from typing import Annotated, Any

from pydantic import Field

from runner.plugin.config import Config
from runner.plugin.progress import UNITS, Unit

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

    A training is counted in exactly one unit; every interval here is in that unit.
    """

    updates: Count | None = None
    """Updates to train for."""
    epochs: Count | None = None
    """Epochs to train for; needs data that have epochs."""
    samples: Count | None = None
    """Samples to train on, repeated ones included."""
    tokens: Count | None = None
    """Tokens to train on, repeated ones included; needs data that are counted in tokens."""
    env_steps: Count | None = None
    """Environment steps to train for; needs data that come from a simulator."""
    batch_size: Count = 128
    """Samples of one update; a stage may cut them into micro-batches."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the average of the parameters that is evaluated instead of them; null evaluates them as they are."""
    evaluate_every: Count | None = None
    """Between two evaluations; null evaluates at the end only."""
    checkpoint_every: Count | None = None
    """Between two checkpoints; null saves at the end only."""
    preemptible: bool = False
    """Whether SIGTERM and SIGINT end the run with exit code 75, which tells a scheduler to resume it."""
    log_every: Count | None = None
    """Between two points of a training metric; null is 1,000 updates or environment steps, or 1 % of the training."""

    @property
    def length(self) -> tuple[Unit, int]:
        """The unit that the training is counted in, and how many of it."""
        return next((unit, count) for unit in UNITS if (count := getattr(self, unit)) is not None)

    @property
    def log_interval(self) -> int:
        """``log_every``, or what stands for it."""
        unit, length = self.length
        return self.log_every or (1000 if unit in ("updates", "env_steps") else max(1, length // 100))

    def values(self) -> dict[str, Any]:
        """As plain values, without the units that it is not counted in."""
        values = self.model_dump(mode="json")
        return {key: value for key, value in values.items() if key not in UNITS or value is not None}


class TrackingConfig(Config):
    """Where the run is kept in MLflow."""

    experiment: Annotated[str, Field(min_length=1)] = "default"
    """The MLflow experiment that the run belongs to."""
    system_metrics: bool = True
    """Whether processor, memory and GPU use are sampled while training."""
