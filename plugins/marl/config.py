"""The settings of multi-agent SAC."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from runner.api import LearnerConfig

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Width = Annotated[int, Field(ge=1)]

STORY = frozenset(
    {"targets", "critic_step", "actor_step", "temperature_step", "target_step"}
)
SHARED = frozenset({"next_actions", "current_action"})
FORWARDS = frozenset({"actor_forward", "critic_forward", "temperatures"})
LOSSES = frozenset({"target", "critic_loss", "actor_loss", "temperature_loss"})
GRADIENTS = frozenset(
    {"critic_gradients", "actor_gradients", "temperature_gradients"}
)


def _form(value: Any) -> str:
    """Returns which form a setting has, so that a mistake is reported for that form alone."""
    return "list" if isinstance(value, list | tuple) else "number"


Discount = Annotated[
    Annotated[Fraction, Tag("number")]
    | Annotated[list[Fraction], Field(min_length=1), Tag("list")],
    Discriminator(_form),
]


class MasacConfig(LearnerConfig):
    """Multi-agent soft actor-critic with centralised twin critics and nothing shared between
    agents.

    Every agent has a separate actor on its observation, a separate twin critic on all observations
    and all actions, a separate target critic and a separate temperature. The update is
    simultaneous: all targets and critic losses are computed with the parameters before the update,
    then all actor losses, with the critics after their step. In the actor loss the other agents'
    actions are fresh (sampled from their present policies) and detached.

    When it helps: continuous actions, a handful of cooperating agents, simulators that are not
    free. When it hurts: its cost grows with the square of the number of agents' observations in
    the critics.
    """

    kind: ClassVar[str] = "masac"
    implementation = ".masac:Masac"
    learns_from: ClassVar[str] = "multi_agent"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "actor": {"kind": "adam", "lr": 1e-3, "max_grad_norm": 1.0},
        "critic": {
            "kind": "adam",
            "lr": 3e-3,
            "eps": 1e-5,
            "max_grad_norm": 1.0,
        },
        "temperature": {"kind": "adam", "lr": 3e-4},
    }
    """Gradients are clipped separately for every network of every agent."""
    moved: ClassVar[Mapping[str, str]] = {
        "model.actor_lr": "optimizer.actor.lr",
        "model.critic_lr": "optimizer.critic.lr",
        "model.alpha_lr": "optimizer.temperature.lr",
        "model.critic_eps": "optimizer.critic.eps",
        "model.max_grad_norm": "optimizer.actor.max_grad_norm and optimizer.critic.max_grad_norm",
    }
    losses_are_means: ClassVar[bool] = True
    slots: ClassVar[frozenset[str]] = (
        STORY | SHARED | FORWARDS | LOSSES | GRADIENTS
    )

    hidden: list[Width] = Field(
        default_factory=lambda: [256, 256], min_length=1
    )
    """Widths of the hidden layers of every actor and critic."""
    gamma: Discount = 0.95
    """Discount factor of all agents, or a list: one for each agent, the last one for all that
    follow.
    """
    tau: Fraction = 0.01
    """Share of the critics that goes into their targets at every update (Polyak averaging)."""
    target_entropy: float = -0.5
    """Entropy that the temperatures steer every policy to, in nats."""
    initial_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of every policy before the first update."""
    update_order: Literal["simultaneous", "sequential"] = "simultaneous"
    """Whether all agents learn from the same parameters, or each from the new ones of
    the agents before it.
    """

    def lacks(self, slot: str) -> str | None:
        """Returns the reason if the update order leaves nothing for a slot to share."""
        if self.update_order == "sequential" and slot in STORY | SHARED:
            return (
                "with model.update_order: sequential every agent learns from parameters that "
                "the agents before it have "
                f"just changed, so there is no '{slot}' shared by all agents; use "
                f"update_order: simultaneous"
            )
        return super().lacks(slot)
