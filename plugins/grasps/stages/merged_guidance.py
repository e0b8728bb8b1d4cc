"""Answers with and without a cloud, in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from runner.api import Close, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..learner import GraspDiffusion


class MergedGuidanceConfig(StageConfig):
    """Evaluates the network with and without a cloud in one call, where guidance needs both.

    When it helps: small batches, for which an evaluation costs the same with twice the rows.
    When it hurts: large batches are no faster, and take twice the memory.
    """

    kind: ClassVar[str] = "merged_guidance"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"both"})

    def contract(self, setting: Setting) -> Close:
        """Products of other sizes."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if there is no guidance, so that one evaluation is sufficient."""
        return (
            None
            if getattr(setting.model, "guidance", 0)
            else "model.guidance is 0: one evaluation is sufficient"
        )

    def implementation(self) -> type[Stage]:
        """The batch."""
        return MergedGuidance


class MergedGuidance(Stage):
    """Replaces two evaluations of the network by one."""

    def attach(self, pipeline: Pipeline) -> None:
        """The rows without a cloud come after those with one."""
        from torch import cat

        learner = cast("GraspDiffusion", pipeline.learner)

        def both(
            x: Tensor, tokens: Tensor, blank: Tensor, level: Tensor
        ) -> tuple[Tensor, Tensor]:
            one, other = learner.clean(
                x.repeat(2, 1, 1), cat([tokens, blank]), level.repeat(2)
            ).chunk(2)
            return one, other

        pipeline.slots.replace("both", both)
