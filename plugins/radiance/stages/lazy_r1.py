"""A gradient penalty in some updates only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field

from runner.api import Pipeline, Setting, Stage, StageConfig, Statistical

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import RadianceGanConfig


class LazyR1Config(StageConfig):
    """Computes the gradient penalty (R1) in every n-th update, with n times the weight.

    Over n updates, the penalty weighs as much as without the stage (StyleGAN2, arXiv 1912.04958,
    appendix B). The number of the update decides, so a resumed run continues the rhythm. Logged
    values of ``r1`` average to the same.

    When it helps: the penalty needs a backward pass through a backward pass. Where the
    discriminator takes a good part of an update, most of that is saved.
    When it hurts: the penalty comes in bursts, which an optimizer without momentum does not spread.
    With the small discriminator of ``graf``, little is saved: 0.97 [0.91, 1.05] times the CPU time
    (one core, November 2026).
    """

    kind: ClassVar[str] = "lazy_r1"
    implementation = "LazyR1"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"update", "gradient_penalty"})
    works_through: ClassVar[frozenset[str] | None] = frozenset({"gradient_penalty"})

    every: Annotated[int, Field(ge=1)] = 4
    """Updates from one penalty to the next, and the factor of its weight."""

    def contract(self, setting: Setting) -> Statistical:
        """Returns Statistical: the mean penalty is the same, in fewer updates."""
        return Statistical()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why there is nothing to save, or None."""
        if cast("RadianceGanConfig", setting.model).r1 == 0:
            return "model.r1 is 0: no penalty"
        if self.every == 1:
            return "every: 1 computes the penalty in each update"
        return None


class LazyR1(Stage):
    """Replaces the penalty by zero in most updates."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the penalty, and the update, which has its number."""
        self.updates = 0
        pipeline.slots.wrap("update", self._numbered)
        pipeline.slots.wrap("gradient_penalty", self._lazy)

    def _numbered(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def update(batch: Any, noise: Any, progress: Any) -> Any:
            self.updates = progress.updates
            return step(batch, noise, progress)

        return update

    def _lazy(self, penalize: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gradient_penalty(real: Tensor, condition: Tensor) -> Tensor:
            # Zero, so that what logs the penalty finds a number in every update.
            if self.updates % self.config.every:
                return real.new_zeros(())
            every: int = self.config.every
            return every * penalize(real, condition)

        return gradient_penalty
