"""Interface of a check: one question of ``runner verify`` about stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from runner.compare.verdict import Verdict
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class Check(ABC):
    """A question about a candidate, which is a recipe with the stages under test, and its
    baseline.
    """

    name: ClassVar[str]
    """A noun phrase: what is compared."""
    question: ClassVar[str]
    catches: ClassVar[str]
    """Faults that it detects, as examples."""
    is_optional: ClassVar[bool] = False
    """Whether a verdict may pass without it when the time budget ends first."""

    def applies(self, pair: StagePair) -> bool:
        """Returns whether the question has a meaning for this pair; otherwise it is skipped."""
        return True

    @abstractmethod
    def cost(self, pair: StagePair) -> str:
        """Returns what it computes for this pair, such as ``24 updates``."""

    @abstractmethod
    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares the candidate with the baseline.

        Args:
            pair: The baseline and the candidate: its ``recipe``, ``stages``, ``contract``, recorded ``batches`` and
                ``subjects()``.
            budget: ``at_most(seconds)`` returns how long a comparison that takes some time may take.

        Raises:
            StepError: an update of the baseline fails.
            BuildError: the candidate cannot be built.
        """
