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
    implementation = "MergedGuidance"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"both"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: matrix products of other sizes round differently."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if there is no guidance, so that one evaluation is sufficient."""
        return (
            None
            if getattr(setting.model, "guidance", 0)
            else "model.guidance is 0: one evaluation is sufficient"
        )


class MergedGuidance(Stage):
    """Replaces two evaluations of the network by one."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot; the rows without a cloud come after those with one."""
        from torch import cat

        learner = cast("GraspDiffusion", pipeline.learner)

        def both(
            x: Tensor, tokens: Tensor, blank: Tensor, timestep: Tensor
        ) -> tuple[Tensor, Tensor]:
            x0 = learner.predict_x0(
                x.repeat(2, 1, 1), cat([tokens, blank]), timestep.repeat(2)
            )
            conditional, unconditional = x0.chunk(2)
            return conditional, unconditional

        pipeline.slots.replace("both", both)
