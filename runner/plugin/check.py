"""Interface of a check: one question about a baseline and a candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from runner.proof.verdict import Verdict


class TimeBudget(Protocol):
    """The time that a comparison may take."""

    def at_most(self, seconds: float) -> float:
        """Returns the seconds that a long part may take, at most those given."""


class PairCheck(ABC):
    """A question about a pair of a baseline and a candidate."""

    name: ClassVar[str]
    """A noun phrase: what is compared."""
    question: ClassVar[str]
    catches: ClassVar[str]
    """Faults that it detects, as examples."""

    def applies(self, pair: Any) -> bool:
        """Returns whether the question has a meaning for this pair; otherwise it is skipped."""
        return True

    @abstractmethod
    def cost(self, pair: Any) -> str:
        """Returns what it computes for this pair, such as ``24 updates``."""

    @abstractmethod
    def run(self, pair: Any, budget: Any) -> Verdict:
        """Compares the candidate with the baseline.

        Args:
            pair: The baseline and the candidate.
            budget: A ``TimeBudget``.

        Raises:
            StepError: an update of the baseline fails.
        """


class Check(PairCheck):
    """A question of ``runner verify`` about a candidate, which is a recipe with the stages under
    test, and its baseline.

    ``run`` receives a ``StagePair``: its ``recipe``, ``stages``, ``contract``, recorded ``batches``
    and ``subjects()``. It may raise a ``BuildError`` if the candidate cannot be built.
    """

    is_optional: ClassVar[bool] = False
    """Whether a verdict may pass without it when the time budget ends first."""
