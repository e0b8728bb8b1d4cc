"""Promises of stages about results, and the metric that judges a result."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

SAMPLE_LOSSES = "sample_losses"
"""Name of the losses of single samples in the result of an update."""


@dataclass(frozen=True)
class Exact:
    """Bits that equal the baseline's."""


@dataclass(frozen=True)
class Close:
    """Algebra that equals the baseline's, with other rounding."""


@dataclass(frozen=True)
class Statistical:
    """No worse in the ``Objective`` than its margin allows."""


Contract = Exact | Close | Statistical


@dataclass(frozen=True)
class Objective:
    """The evaluation metric by which one model is better than another."""

    name: str
    """Of the metric, without ``eval/``."""
    direction: Literal["maximize", "minimize"]
    margin: float = 0.05
    """Largest allowed loss by a stage: in ``unit``, or without a unit as a share of
    what the baseline learns.
    """
    unit: str | None = None
    """Of the metric and its margin ("nats", "percentage points"); None makes the margin a share."""

    @property
    def sign(self) -> float:
        """Returns the factor that turns the metric into a score to maximize."""
        return 1.0 if self.direction == "maximize" else -1.0


HELD_OUT_LOSS = Objective("loss", "minimize")
"""The objective of a ``GradientLearner`` on a dataset where neither declares one."""


class Mean(NamedTuple):
    """A sum and of how many things it is: means over several batches are then true means."""

    sum: Any
    """A scalar tensor, or a number."""
    count: Any
    """Items, tokens, pixels; a tensor or a number."""
