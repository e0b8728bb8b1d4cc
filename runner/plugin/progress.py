"""Progress of a training, in every possible unit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Unit = Literal["updates", "epochs", "samples", "tokens", "env_steps"]
UNITS: tuple[Unit, ...] = get_args(Unit)
"""Units of a training's length; a recipe's ``train`` names exactly one."""


@dataclass
class Progress:
    """Counts of a training, and its length in the recipe's unit."""

    unit: Unit
    length: int
    """Length of the training, in the recipe's unit."""
    epoch_samples: int | None = None
    """Samples of an epoch; None if the data have no epochs."""
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    env_steps: int = 0

    @property
    def epochs(self) -> int:
        """Number of complete epochs."""
        return self.samples // self.epoch_samples if self.epoch_samples else 0

    @property
    def done(self) -> int:
        """Returns the finished part of ``length``."""
        return int(getattr(self, self.unit))

    @property
    def position(self) -> int:
        """Returns a count that grows with every update that may end a stretch of work: ``done``, or
        the samples for epochs.
        """
        return int(getattr(self, self.counted))

    @property
    def counted(self) -> str:
        """Name of the count that ``position`` returns."""
        return "samples" if self.unit == "epochs" else self.unit

    @property
    def whole(self) -> int:
        """``position`` at the end of the training."""
        if self.unit == "epochs":
            return self.length * (self.epoch_samples or 1)
        return self.length

    @property
    def fraction(self) -> float:
        """Finished share of the training, 0 to 1; grows within an epoch, too."""
        # The last batch may exceed a length that is counted in samples.
        return min(1.0, self.position / self.whole)

    def advance(self, counts: Mapping[str, int]) -> None:
        """Adds the counts of a training step, by unit."""
        for unit, count in counts.items():
            setattr(self, unit, getattr(self, unit) + count)

    def state_dict(self) -> dict[str, int]:
        """Returns the counts; those of epochs follow from the samples."""
        return {unit: getattr(self, unit) for unit in UNITS if unit != "epochs"}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores what ``state_dict`` returned."""
        vars(self).update(state)
