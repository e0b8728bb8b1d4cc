"""One backward for the critics of all agents."""

from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Batch, Exact, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..masac import CriticStep


class MergedCriticLossConfig(StageConfig):
    """Adds the critic losses of all agents and runs one backward.

    The critics share no parameter, so the gradient of the sum is the gradient of each. Gradients are zeroed before the
    backward, and clipped for every agent apart, as without the stage.

    When it helps: several agents; and it is what lets their critics be stacked.
    When it hurts: the activations of all critics are alive at once.
    """

    kind: ClassVar[str] = "merged_critic_loss"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"critic_step"})

    def contract(self, setting: Setting) -> Exact:
        """The same bits."""
        return Exact()

    def implementation(self) -> type[Stage]:
        """The critic step."""
        return MergedCriticLoss


class MergedCriticLoss(Stage):
    """One critic step for all agents."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the critic step."""
        self.slots = pipeline.slots
        self.roles: dict[str, Any] = pipeline.learner.roles
        pipeline.slots.replace("critic_step", self.critic_step)

    def critic_step(self, batch: Batch, y: "Tensor") -> "CriticStep":
        """One loss, one backward; one clip and one optimizer step for every agent.

        Args:
            batch: [B, ...].
            y: targets, [N, B].
        """
        self.roles["critic"].zero_grad()
        result: CriticStep = self.slots.critic_gradients(batch, y, slice(None))
        self.roles["critic"].step(self.slots)
        return result
