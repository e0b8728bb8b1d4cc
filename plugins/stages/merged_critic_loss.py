"""One backward for the critics of all agents."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Batch, Exact, Pipeline, Stage

if TYPE_CHECKING:
    from torch import Tensor


class MergedCriticLoss(Stage):
    """Adds the critic losses of all agents and runs one backward; freezes the critics in the actor loss.

    The critics share no parameter, so the gradient of the sum is the gradient of each. Gradients are zeroed before the
    backward, and clipped for every agent apart, as without the stage. In the actor loss the critics only carry the
    gradient to the actions: frozen, they do not compute weight gradients that the next update would throw away.

    When it helps: several agents; the frozen critics save a third of the actor loss's critic backward.
    When it hurts: the activations of all critics are alive at once.
    """

    kind: ClassVar[str] = "merged_critic_loss"
    phase: ClassVar[int] = 1
    contract = Exact()
    claims: ClassVar[frozenset[str]] = frozenset({"critic_step"})
    wraps: ClassVar[frozenset[str]] = frozenset({"actor_step"})

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the critic step and freezes the critics around the actor step."""
        self.slots = pipeline.slots
        self.roles: dict[str, Any] = pipeline.learner.roles  # type: ignore[attr-defined]  # what offers the slot has it
        pipeline.slots.replace("critic_step", self.critic_step)
        pipeline.slots.wrap("actor_step", self._freeze_critics)

    def critic_step(self, batch: Batch, y: "Tensor") -> "tuple[Tensor, Tensor]":
        """One loss, one backward; one clip and one optimizer step for every agent.

        Args:
            batch: [B, ...].
            y: targets, [N, B].

        Returns:
            Loss, [N], and absolute TD error, [N, B].
        """
        self.roles["critic"].zero_grad()
        loss, td_error = self.slots.critic_loss(batch, y, slice(None))
        self.slots.backward(loss.sum())
        self.roles["critic"].step(self.slots)
        return loss.detach(), td_error

    def _freeze_critics(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def actor_step(batch: Batch, noise: Batch) -> Any:
            self.roles["critic"].requires_grad_(False)
            try:
                return step(batch, noise)
            finally:
                self.roles["critic"].requires_grad_(True)

        return actor_step
