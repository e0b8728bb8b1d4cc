"""Computes one backward for the critics of all agents."""

from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Batch, Exact, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..masac import CriticStep


class MergedCriticLossConfig(StageConfig):
    """Adds the critic losses of all agents and runs one backward.

    The critics share no parameter, so the gradient of the sum is the gradient of each. Gradients
    are zeroed before the backward, and clipped separately for every agent, as without the stage.

    When it helps: several agents; and stacked critics require it.
    When it hurts: the activations of all critics are in memory together.
    """

    kind: ClassVar[str] = "merged_critic_loss"
    implementation = "MergedCriticLoss"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"critic_step"})

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same bits."""
        return Exact()


class MergedCriticLoss(Stage):
    """Performs one critic step for all agents."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the critic step."""
        self.slots = pipeline.slots
        self.roles: dict[str, Any] = pipeline.learner.roles
        pipeline.slots.replace("critic_step", self.critic_step)

    def critic_step(self, batch: Batch, y: "Tensor") -> "CriticStep":
        """Computes one loss and one backward; one clip and one optimizer step for every agent.

        Args:
            batch: [B, ...].
            y: targets, [N, B].
        """
        self.roles["critic"].zero_grad()
        result: CriticStep = self.slots.critic_gradients(batch, y, slice(None))
        self.roles["critic"].step(self.slots)
        return result
