"""Proximal policy optimization (Schulman et al. 2017) of a cart that balances a pole."""

import torch
from torch import nn
from torch.distributions import Categorical

from runner.api import BatchLayout, Learner, LearnerConfig, Objective, Source, SourceConfig

LIMIT = 200  # steps of an episode


class PpoConfig(LearnerConfig):
    """A network with logits of actions and a value, trained several times on every batch."""

    kind, learns_from = "example_ppo", "example_steps"
    implementation = "Ppo"
    hidden: int = 64
    passes: int = 4
    clip: float = 0.2


class Ppo(Learner):
    noise_layout = BatchLayout(shared={"order"})

    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        layers = nn.Linear(*shapes["observation"], config.hidden), nn.Tanh(), nn.Linear(config.hidden, 3)
        self.model = self.role("model", nn.Sequential(*layers))

    def noise(self, batch, generator):
        size = len(batch["action"])
        orders = [torch.randperm(size, generator=generator, device=self.device) for _ in range(self.config.passes)]
        return {"order": torch.stack(orders)}

    def update(self, batch, noise, progress):
        for index in noise["order"].reshape(4 * self.config.passes, -1):
            rows = {name: tensor[index] for name, tensor in batch.items()}
            output = self.model.module(rows["observation"])
            policy = Categorical(logits=output[:, :2])
            ratio = (policy.log_prob(rows["action"]) - rows["log_prob"]).exp()
            clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
            gain = torch.minimum(ratio * rows["advantage"], clipped * rows["advantage"]).mean()
            error = (output[:, 2] - rows["return"]).square().mean()
            self.model.zero_grad()
            self.slots.backward(0.01 * error - gain - 0.01 * policy.entropy().mean())
            self.model.step()
        return {"value_error": error.detach(), "gain": gain.detach()}

    def inputs(self, batch):
        return batch["observation"]

    @torch.no_grad()
    def predict(self, inputs):
        return self.model.module(inputs)


class CartConfig(SourceConfig):
    """Carts with poles (Barto, Sutton and Anderson 1983), all in one batch of tensors."""

    kind, provides = "example_cart", "example_steps"
    implementation = "Cart"
    headline, objective = ("return",), Objective("return", "maximize")
    envs: int = 16


class Cart(Source):
    shapes = {"observation": (4,)}

    def __init__(self, config, context):
        self.generator = context.generator("carts", "cpu")
        self.state = self.starts(config.envs, self.generator)

    def bind(self, learner):
        self.predict = lambda state: learner.predict(state[:, :4].to(learner.device)).cpu()

    def starts(self, count, generator):
        """Returns position, speed, angle, angular velocity and the number of steps, [count, 5]."""
        return torch.cat([torch.rand(count, 4, generator=generator) / 10 - 0.05, torch.zeros(count, 1)], dim=1)

    def step(self, state, action):
        """Returns the states after 0.02 s, and which episodes are over."""
        _, speed, angle, turn, _ = state.unbind(1)
        push = (20 * action - 10 + 0.05 * turn.square() * angle.sin()) / 1.1
        turn_change = (9.8 * angle.sin() - angle.cos() * push) / (2 / 3 - 0.05 * angle.cos().square() / 1.1)
        push -= 0.05 * turn_change * angle.cos() / 1.1
        change = torch.stack([speed, push, turn, turn_change, torch.full_like(turn, 50)], dim=1)
        state = state + 0.02 * change
        return state, (state[:, [0, 2, 4]].abs() > torch.tensor([2.4, 0.21, LIMIT - 0.5])).any(1)

    def draw(self, batch_size, progress):
        steps = []
        for _ in range(batch_size // len(self.state)):
            output, observation = self.predict(self.state), self.state[:, :4]
            log_probs = output[:, :2].log_softmax(1)
            action = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
            state, over = self.step(self.state, action[:, 0])
            self.state = torch.where(over[:, None], self.starts(len(over), self.generator), state)
            steps.append((observation, action[:, 0], log_probs.gather(1, action)[:, 0], output[:, 2], ~over))
        observation, action, log_prob, value, continues = map(torch.stack, zip(*steps, strict=True))
        following, later, advantage = self.predict(self.state)[:, 2], 0, torch.zeros_like(value)
        for number in reversed(range(len(value))):  # generalized advantage estimation
            later = 1 + continues[number] * (0.99 * following + 0.94 * later) - value[number]
            following, advantage[number] = value[number], later
        batch = {"observation": observation, "action": action, "log_prob": log_prob, "return": advantage + value}
        batch["advantage"] = (advantage - advantage.mean()) / advantage.std()
        return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}

    def evaluate(self, learner):
        state, running = self.starts(32, torch.Generator().manual_seed(0)), torch.ones(LIMIT, 32)
        for number in range(1, LIMIT):
            state, over = self.step(state, self.predict(state)[:, :2].argmax(1))
            running[number] = running[number - 1] * ~over
        return {"return": running.sum(0).mean().item()}

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]
