"""Computes all agents in one batched matmul."""

from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Batch, Close, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..masac import ActorStep


class StackedAgentsConfig(StageConfig):
    """Stacks the parameters of all agents, so that every layer of every network is one batched
    matmul.

    Actors, critics, target critics and temperatures are each in one flat vector: one optimizer
    step, one Polyak average, one gradient to zero. Agents still share no parameter, and gradients
    are clipped separately for every agent.

    When it helps: two agents or more; small networks, whose cost is calls rather than arithmetic.
    When it hurts: very wide networks, where one agent's matmul already fills the machine.
    """

    kind: ClassVar[str] = "stacked_agents"
    implementation = "StackedAgents"
    phase: ClassVar[int] = 2
    claims: ClassVar[frozenset[str]] = frozenset(
        {"actor_forward", "critic_forward", "temperatures"}
        | {"targets", "actor_step", "temperature_step", "target_step", "clip"}
    )
    requires: ClassVar[tuple[str, ...]] = (
        "forward_cache",
        "merged_critic_loss",
    )

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class StackedAgents(Stage):
    """Replaces the learner's loops over agents."""

    def attach(self, pipeline: Pipeline) -> None:
        """Moves the learner's parameters into stacks and replaces its loops over agents."""
        from ..stacked import ClipAgents, Stack, StackedMlp, StackedRole

        learner: Any = pipeline.learner
        self.slots = pipeline.slots
        self.learner = learner
        self.agents = learner.agents
        self.roles: dict[str, StackedRole] = {}
        for name, networks in learner.networks().items():
            self.roles[name] = StackedRole(
                networks, self.agents, learner.roles[name].settings
            )
        learner.roles.update(self.roles)
        # One slice of all agents: the learner's loops have a single iteration.
        learner.slices = [slice(None)]
        self.targets_stack = Stack(learner.target_networks())
        self.actors = StackedMlp(self.roles["actor"].layers)
        self.critics = {
            "online": StackedMlp(self.roles["critic"].layers),
            "target": StackedMlp(self.targets_stack.views),
        }
        for name in sorted(self.config.claims - {"clip"}):
            pipeline.slots.replace(name, getattr(self, name))
        pipeline.slots.replace("clip", ClipAgents(self.agents))

    def actor_forward(self, observation: "Tensor", agents: slice) -> "Tensor":
        """Returns mean and log standard deviation of all policies: [B, N, o] to [N, B, 2 a]."""
        return self.actors(observation.transpose(0, 1), self.slots.precision)

    def critic_forward(
        self, which: str, observation: "Tensor", action: "Tensor", agents: slice
    ) -> "Tensor":
        """Returns Q values of all critics, [N, 2, B].

        They are those of one joint action for all, [B, N a], or of one for each, [N, B, N a].
        """
        import torch

        networks = 2 * self.agents
        if action.dim() == 2:
            inputs = torch.cat([observation, action], dim=-1).expand(
                networks, -1, -1
            )
        else:
            # Both critics of an agent have the same inputs.
            action = action.repeat_interleave(2, dim=0)
            inputs = torch.cat(
                [observation.expand(networks, -1, -1), action], dim=-1
            )
        q = self.critics[which](inputs, self.slots.precision)
        return q.view(self.agents, 2, -1)

    def targets(self, batch: Batch, noise: Batch) -> "Tensor":
        """Returns the targets of the critics, [N, B]."""
        return self.slots.target(batch, noise, slice(None))  # type: ignore[no-any-return]

    def actor_step(self, batch: Batch, noise: Batch) -> "ActorStep":
        """Computes one loss, one backward and one optimizer step for all actors."""
        self.roles["actor"].zero_grad()
        with self.roles["critic"].frozen(), self.roles["temperature"].frozen():
            result: ActorStep = self.slots.actor_gradients(
                batch, noise, slice(None)
            )
        self.roles["actor"].step(self.slots)
        return result

    def temperature_step(self, log_prob: "Tensor") -> None:
        """Performs one optimizer step for all temperatures."""
        self.roles["temperature"].zero_grad()
        self.slots.temperature_gradients(log_prob, slice(None))
        self.roles["temperature"].gather()
        self.roles["temperature"].step(self.slots)

    def temperatures(self, agents: slice) -> "Tensor":
        """Returns the logarithms of the temperatures, [N]."""
        return self.roles["temperature"].layers[0]

    def target_step(self) -> None:
        """Polyak averaging in one call."""
        self.targets_stack.flat.lerp_(
            self.roles["critic"].stack.flat, self.learner.tau
        )
