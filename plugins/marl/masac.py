"""Multi-agent soft actor-critic, written as a textbook would: one agent after the other, no step
merged or cached.

Shapes: B batch, N agents, n the agents in the slice ``agents``, o observation, a action.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.api import (
    Batch,
    BatchLayout,
    Context,
    Learner,
    Progress,
    State,
    UsageError,
)

from .config import MasacConfig
from .networks import Mlp, TwinCritic, squash
from .roles import ALL, AgentsRole, polyak
from .work import least_bytes, least_flop


class CriticStep(NamedTuple):
    """The result of a critic step."""

    loss: Tensor
    """[N]"""
    td_error: Tensor
    """Absolute TD error as the mean of both critics, [N, B]."""


class ActorStep(NamedTuple):
    """The result of an actor step."""

    loss: Tensor
    """[N]"""
    log_prob: Tensor
    """Log-probability of the fresh actions, [N, B]."""


class Masac(Learner):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) for every agent.

    The critics are centralised, as in Lowe et al. 2017.
    """

    story: tuple[str, ...] = (
        "targets",
        "critic_step",
        "actor_step",
        "temperature_step",
        "target_step",
    )
    noise_layout = BatchLayout(columns={"next", "current"})
    compilable = ("target", "critic_gradients", "actor_gradients")

    def __init__(
        self,
        config: MasacConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> None:
        super().__init__(config, shapes, context)
        self.agents, self.observation = shapes["observation"]
        self.slices = [slice(i, i + 1) for i in range(self.agents)]
        """Order of the agents' work: one after the other, unless a stage stacks the agents."""
        self.action = shapes["action"][1]
        self.hidden = config.hidden
        self.gamma = self._discounts(config.gamma)
        self.tau = config.tau
        self.target_entropy = config.target_entropy
        self.sequential = config.update_order == "sequential"
        if self.sequential:
            self.story = ("target", "critic_loss", "actor_loss")

        initial = context.generator("parameters", "cpu")
        joint = self.agents * (self.observation + self.action)
        log_temperature = math.log(config.initial_temperature)
        self.actors = [
            Mlp(self.observation, config.hidden, 2 * self.action, initial)
            for _ in range(self.agents)
        ]
        self.critics = {
            "online": [
                TwinCritic(joint, config.hidden, initial)
                for _ in range(self.agents)
            ]
        }
        temperatures = nn.ParameterList(
            torch.tensor(log_temperature) for _ in range(self.agents)
        )
        modules = {
            "actors": nn.ModuleList(self.actors),
            "critics": nn.ModuleList(self.critics["online"]),
            "log_temperatures": temperatures,
        }
        # Parameters are drawn on the CPU, so that all devices start with the same numbers.
        self.model = nn.ModuleDict(modules).to(self.device)
        self.critics["target"] = copy.deepcopy(self.critics["online"])
        target_critics = nn.ModuleList(self.critics["target"])
        self.target_critics = target_critics.requires_grad_(False)
        self.log_temperatures = list(
            self.model["log_temperatures"].parameters()
        )
        parameters = {
            "actor": [list(actor.parameters()) for actor in self.actors],
            "critic": [
                list(critic.parameters()) for critic in self.critics["online"]
            ],
            "temperature": [[p] for p in self.log_temperatures],
        }
        self.roles = {
            name: AgentsRole(agents, context.optimizers[name])
            for name, agents in parameters.items()
        }

    # --- the update ---

    def update(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> dict[str, Tensor]:
        """Performs one update of all agents; ``MasacConfig`` defines "simultaneous"."""
        if self.sequential:
            return self.sequential_update(batch, noise)
        y = self.slots.targets(batch, noise)
        critic_loss, td_error = self.slots.critic_step(batch, y)
        actor_loss, log_prob = self.slots.actor_step(batch, noise)
        self.slots.temperature_step(log_prob)
        self.slots.target_step()
        return self._output(critic_loss, td_error, actor_loss, log_prob)

    def sequential_update(
        self, batch: Batch, noise: Batch
    ) -> dict[str, Tensor]:
        """Performs one update in which every agent finishes before the next one starts."""
        outputs = []
        self.roles["actor"].zero_grad()
        for agents in self.slices:
            y = self.slots.target(batch, noise, agents)
            self.roles["critic"].zero_grad(agents)
            critic = self.slots.critic_gradients(batch, y, agents)
            self.roles["critic"].step(self.slots, agents)
            with (
                self.roles["critic"].frozen(),
                self.roles["temperature"].frozen(),
            ):
                actor = self.slots.actor_gradients(batch, noise, agents)
            outputs.append((*critic, *actor))
            self.roles["actor"].step(self.slots, agents)
            _, log_prob = actor
            self._temperature_step(log_prob, agents)
            self._target_step(agents)
        columns = zip(*outputs, strict=True)
        return self._output(*(torch.cat(column) for column in columns))

    def targets(self, batch: Batch, noise: Batch) -> Tensor:
        """Returns the targets of the critics, [N, B]."""
        return torch.cat(
            [self.slots.target(batch, noise, agents) for agents in self.slices]
        )

    def critic_step(self, batch: Batch, y: Tensor) -> CriticStep:
        """Computes one loss, one backward, one clip and one optimizer step for every agent."""
        steps = []
        for agents in self.slices:
            self.roles["critic"].zero_grad(agents)
            steps.append(self.slots.critic_gradients(batch, y[agents], agents))
            self.roles["critic"].step(self.slots, agents)
        return CriticStep(*map(torch.cat, zip(*steps, strict=True)))

    def actor_step(self, batch: Batch, noise: Batch) -> ActorStep:
        """Computes every agent's actor gradient on the same parameters, then steps all actors."""
        self.roles["actor"].zero_grad()
        # The actor loss needs no gradients of the critics' parameters, which cost as much as
        # those of the actions.
        with self.roles["critic"].frozen(), self.roles["temperature"].frozen():
            gradients = partial(self.slots.actor_gradients, batch, noise)
            steps = list(map(gradients, self.slices))
        self.roles["actor"].step(self.slots)
        return ActorStep(*map(torch.cat, zip(*steps, strict=True)))

    def temperature_step(self, log_prob: Tensor) -> None:
        """Moves every temperature so that its policy's entropy nears the target entropy."""
        for agents in self.slices:
            self._temperature_step(log_prob[agents], agents)

    def target_step(self) -> None:
        """Polyak averaging of the target critics."""
        self._target_step(ALL)

    # --- losses and their gradients, which stay at the parameters ---

    def critic_gradients(
        self, batch: Batch, y: Tensor, agents: slice
    ) -> CriticStep:
        """Computes the critic losses of these agents, their backward and clipping."""
        loss, td_error = self.slots.critic_loss(batch, y, agents)
        self.slots.backward(loss.sum())
        self.roles["critic"].clip(self.slots, agents)
        return CriticStep(loss.detach(), td_error)

    def actor_gradients(
        self, batch: Batch, noise: Batch, agents: slice
    ) -> ActorStep:
        """Computes the actor losses of these agents, their backward and clipping."""
        loss, log_prob = self.slots.actor_loss(batch, noise, agents)
        self.slots.backward(loss.sum())
        self.roles["actor"].clip(self.slots, agents)
        return ActorStep(loss.detach(), log_prob)

    def temperature_gradients(self, log_prob: Tensor, agents: slice) -> None:
        """Computes the temperature losses of these agents and their backward."""
        self.slots.backward(self.slots.temperature_loss(log_prob, agents).sum())

    # --- pure functions of parameters, batch and noise ---

    @torch.no_grad()
    def target(self, batch: Batch, noise: Batch, agents: slice) -> Tensor:
        """Returns r + gamma (1 - terminated) (min Q'(s', a') - alpha log pi(a' | s')), [n, B]."""
        actions, log_prob = self.slots.next_actions(batch, noise)
        observation = batch["next_observation"].flatten(1)
        action = actions.transpose(0, 1).flatten(1)
        q = self.slots.critic_forward(
            "target", observation, action, agents
        ).amin(1)
        alpha = self.slots.temperatures(agents).exp()[:, None]
        gamma = (
            self.gamma if isinstance(self.gamma, float) else self.gamma[agents]
        )
        # A truncated episode is not terminated: its value continues.
        discount = gamma * (1 - batch["terminated"])
        reward = batch["reward"].transpose(0, 1)[agents]
        y: Tensor = reward + discount * (q - alpha * log_prob[agents])
        return y

    def critic_loss(
        self, batch: Batch, y: Tensor, agents: slice
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss and the absolute TD error.

        The loss is mean w (Q1 - y)^2 + mean w (Q2 - y)^2, [n]. The error is |Q - y| as the mean
        of both critics, [n, B].
        """
        observation = batch["observation"].flatten(1)
        action = batch["action"].flatten(1)
        q = self.slots.critic_forward("online", observation, action, agents)
        error = q - y[:, None]
        loss = (batch["weight"] * error.square()).mean(-1).sum(-1)
        return loss, error.detach().abs().mean(1)

    def actor_loss(
        self, batch: Batch, noise: Batch, agents: slice
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean of (alpha log pi(a | s) - min Q(s, the agent's new action, the others'
        new actions, detached)), [n].

        Returns:
            Loss, [n], and log-probability, [n, B], detached.
        """
        agent_range = range(self.agents)[agents]
        all_actions = []
        log_probs = []
        for agent, agent_slice in enumerate(self.slices):
            is_learning = agent_range.start <= agent < agent_range.stop
            with torch.set_grad_enabled(is_learning):
                action, log_prob = self.slots.current_action(
                    batch, noise, agent_slice
                )
            all_actions.append(action)
            if is_learning:
                log_probs.append(log_prob)
        actions = torch.cat(all_actions)
        log_prob = torch.cat(log_probs)

        # One joint action for each of these agents, in which all except its own are detached.
        rows = (
            actions.detach()
            .expand(len(agent_range), *actions.shape)
            .flatten(0, 1)
        )
        # Scattered rather than selected by a mask, whose gradient would be a sum of zeros except
        # for one agent.
        rows = rows.slice_scatter(
            actions[agents], start=agent_range.start, step=self.agents + 1
        )
        joint = rows.unflatten(0, (-1, self.agents)).transpose(1, 2).flatten(2)  # type: ignore[no-untyped-call]
        observation = batch["observation"].flatten(1)
        q = self.slots.critic_forward(
            "online", observation, joint, agents
        ).amin(1)
        alpha = self.slots.temperatures(agents).detach().exp()[:, None]
        return (alpha * log_prob - q).mean(-1), log_prob.detach()

    def temperature_loss(self, log_prob: Tensor, agents: slice) -> Tensor:
        """Returns -alpha mean (log pi + target entropy), [n]."""
        negative_alpha = -self.slots.temperatures(agents).exp()
        loss: Tensor = negative_alpha * (log_prob + self.target_entropy).mean(
            -1
        )
        return loss

    def next_actions(self, batch: Batch, noise: Batch) -> tuple[Tensor, Tensor]:
        """Samples the actions of all agents at the next observation.

        Returns:
            Actions, [N, B, a], and their log-probabilities, [N, B].
        """
        head = self.slots.actor_forward(batch["next_observation"], ALL)
        return squash(head, noise["next"])

    def current_action(
        self, batch: Batch, noise: Batch, agents: slice
    ) -> tuple[Tensor, Tensor]:
        """Samples actions at the observation, [n, B, a], with their log-probabilities, [n, B]."""
        head = self.slots.actor_forward(batch["observation"], agents)
        return squash(head, noise["current"][agents])

    def actor_forward(self, observation: Tensor, agents: slice) -> Tensor:
        """Returns mean and log standard deviation of the policies: [B, N, o] to [n, B, 2 a]."""
        observations = observation.unbind(1)[agents]
        heads = []
        for actor, observed in zip(
            self.actors[agents], observations, strict=True
        ):
            heads.append(actor(observed, self.slots.precision))
        return torch.stack(heads)

    def critic_forward(
        self, which: str, observation: Tensor, action: Tensor, agents: slice
    ) -> Tensor:
        """Returns Q values of both critics of every agent, [n, 2, B].

        Args:
            which: "online" or "target".
            observation: observations of all agents, [B, N o].
            action: actions of all agents, the same for every critic, [B, N a], or one for each,
                [n, B, N a].
            agents: the agents whose critics are evaluated.
        """
        critics = self.critics[which][agents]
        actions = action
        if action.dim() == 2:
            actions = action.expand(len(critics), *action.shape)
        q = []
        for critic, joint_action in zip(critics, actions, strict=True):
            inputs = torch.cat([observation, joint_action], dim=-1)
            q.append(critic(inputs, self.slots.precision).T)
        return torch.stack(q)

    def temperatures(self, agents: slice) -> Tensor:
        """Returns the logarithms of the temperatures, [n]."""
        return torch.stack([*self.log_temperatures[agents]])

    # --- acting ---

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Returns the mean actions: [B, N, o] to [B, N, a]."""
        mean: Tensor = self.slots.actor_forward(inputs, ALL)[..., : self.action]
        return mean.tanh().transpose(0, 1)

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Samples actions from the policies: [B, N, o] to [B, N, a]."""
        noise = torch.randn(
            self.agents,
            len(observation),
            self.action,
            generator=generator,
            device=self.device,
        )
        actions, _ = squash(self.slots.actor_forward(observation, ALL), noise)
        return actions.transpose(0, 1)

    def inputs(self, batch: Batch) -> Tensor:
        """Returns the observations."""
        observation: Tensor = batch["observation"]
        return observation

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns standard normal numbers for the actions, [N, B, a].

        Those at the next observation are "next", those at the observation "current".
        """
        shape = (2, self.agents, len(batch["reward"]), self.action)
        normal = torch.randn(shape, generator=generator, device=self.device)
        next_noise, current_noise = normal.unbind()
        return {"next": next_noise, "current": current_noise}

    def least_work(self, batch_size: int) -> tuple[int, int]:
        """Returns the minimal FLOP and bytes of one update; see ``work``."""
        sizes = (
            self.agents,
            self.observation,
            self.action,
            self.hidden,
            batch_size,
        )
        parameters = sum(
            parameter.numel() for _, parameter in self.named_parameters()
        )
        return least_flop(*sizes), least_bytes(*sizes, parameters)

    # --- state ---

    def configure_optimizers(self) -> None:
        """Creates one optimizer for every agent and role."""
        for name, role in self.roles.items():
            settings = role.settings
            if settings.settings.get("weight_decay") and settings.spare:
                raise UsageError(
                    f"optimizer.{name}.weight_decay: masac cannot exclude parameters from it; "
                    f"set spare: []"
                )
            role.configure(self.slots)

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """Yields the optimizers of all agents."""
        return (
            (name, optimizer)
            for name, role in self.roles.items()
            for optimizer in role.optimizers
        )

    def periods(self) -> dict[str, int]:
        """Returns no periods, because everything is stepped in every update."""
        return {}

    def modules(self) -> Mapping[str, nn.Module]:
        """Returns the networks and temperatures, and the target critics."""
        return {"model": self.model, "target_critics": self.target_critics}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all trainable parameters, agent by agent."""
        yield from self.model.named_parameters()

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the last gradient of every trainable parameter."""
        # Stacked agents have their gradients in a vector.
        for role in self.roles.values():
            role.expose_gradients()
        return super().gradients()

    def state_dict(self) -> State:
        """Returns parameters, target critics and optimizers."""
        return {
            "model": self.model.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "roles": {
                name: role.state_dict() for name, role in self.roles.items()
            },
        }

    def weights(self, state: State) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the weights of networks, temperatures and target critics."""
        return {name: state[name] for name in self.modules()}

    def load_state_dict(self, state: State) -> None:
        """Restores parameters, target critics and optimizers in place."""
        self.model.load_state_dict(state["model"])
        self.target_critics.load_state_dict(state["target_critics"])
        for name, role in self.roles.items():
            role.load_state_dict(state["roles"][name])

    def networks(self) -> dict[str, list[list[nn.Parameter]]]:
        """Returns parameters of all networks of the same shape in every role; an agent's two
        critics are neighbours.
        """
        return {
            "actor": [list(actor.parameters()) for actor in self.actors],
            "critic": _twins(self.critics["online"]),
            "temperature": [[p] for p in self.log_temperatures],
        }

    def target_networks(self) -> list[list[nn.Parameter]]:
        """Returns the same for the target critics."""
        return _twins(self.critics["target"])

    def _discounts(self, gamma: float | list[float]) -> float | Tensor:
        """Returns the discount factor of all agents, or one for each, [N, 1].

        Raises:
            UsageError: There are more factors than agents.
        """
        if isinstance(gamma, float):
            return gamma
        if len(gamma) > self.agents:
            raise UsageError(
                f"model.gamma: {len(gamma)} discount factors exceed the {self.agents} agents "
                f"of the data; remove some"
            )
        factors = [*gamma, *gamma[-1:] * (self.agents - len(gamma))]
        return torch.tensor(factors, device=self.device)[:, None]

    # --- for one slice of agents ---

    def _temperature_step(self, log_prob: Tensor, agents: slice) -> None:
        self.roles["temperature"].zero_grad(agents)
        self.slots.temperature_gradients(log_prob, agents)
        self.roles["temperature"].step(self.slots, agents)

    def _target_step(self, agents: slice) -> None:
        targets = self.critics["target"][agents]
        critics = self.critics["online"][agents]
        for target, online in zip(targets, critics, strict=True):
            polyak(
                list(target.parameters()), list(online.parameters()), self.tau
            )

    def _output(
        self,
        critic_loss: Tensor,
        td_error: Tensor,
        actor_loss: Tensor,
        log_prob: Tensor,
    ) -> dict[str, Tensor]:
        return {
            "critic_loss": critic_loss.mean(),
            "actor_loss": actor_loss.mean(),
            "entropy": -log_prob.mean(),
            "temperature": self.slots.temperatures(ALL).detach().exp().mean(),
            "td_error": td_error.mean(0),
        }


def _twins(critics: list[TwinCritic]) -> list[list[nn.Parameter]]:
    return [
        list(q.parameters()) for critic in critics for q in critic.children()
    ]
