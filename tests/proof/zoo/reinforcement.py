"""Reinforcement learning from batches of transitions."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional

from zoo.model import Model

OBSERVED, ACTIONS = 5, 2


class SoftActorCritic(Model):
    """Twin critics with slow copies, an actor with a squashed Gaussian, a learned and annealed temperature."""

    optimizer = partial(optim.Adam, lr=3e-3)
    own = (
        "stacked critics", "one backward for each critic", "slow copies by lerp", "slow copies by foreach",
        "actions drawn first",
    )  # fmt: skip
    without = ("flat gradients",)

    @staticmethod
    def batch(draw):
        return {
            "seen": torch.randn(16, OBSERVED, generator=draw),
            "action": torch.rand(16, ACTIONS, generator=draw) * 2 - 1,
            "reward": torch.randn(16, generator=draw),
            "next": torch.randn(16, OBSERVED, generator=draw),
            "noise": torch.randn(2, 16, ACTIONS, generator=draw),
        }

    def __init__(self, way):
        super().__init__(way)

        def critic():
            return nn.Sequential(nn.Linear(OBSERVED + ACTIONS, 16), nn.ReLU(), nn.Linear(16, 1))

        self.actor = nn.Sequential(nn.Linear(OBSERVED, 16), nn.ReLU(), nn.Linear(16, 2 * ACTIONS))
        self.critics, self.slow = (nn.ModuleList(critic() for _ in range(2)) for _ in range(2))
        self.slow.load_state_dict(self.critics.state_dict())
        self.slow.requires_grad_(False)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def trained(self):
        return {
            "critics'": [*self.critics.parameters()],
            "actor's": [*self.actor.parameters()],
            "its": [self.temperature],
        }

    def act(self, seen, noise):
        mean, spread = self.actor(seen).chunk(2, 1)
        spread = spread.clamp(-5, 2)
        raw = mean + spread.exp() * noise
        density = (-noise.square() / 2 - spread - 0.9189385332046727).sum(1)
        return raw.tanh(), density - (2 * (0.6931471805599453 - raw - functional.softplus(-2 * raw))).sum(1)

    def judge(self, critics, seen, action):
        x = torch.cat([seen, action], 1)
        if "stacked critics" not in self.way:
            return torch.stack([critic(x)[:, 0] for critic in critics])
        x = x.expand(2, -1, -1)
        for layer in (0, 2):
            weight, bias = (torch.stack([getattr(c[layer], name) for c in critics]) for name in ("weight", "bias"))
            x = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
            x = x.relu() if layer == 0 else x
        return x[..., 0]

    def step(self, loop, batch):
        criticising, acting, tempering = loop.optimizers.values()
        self.updates += 1
        weight = self.temperature.exp().detach() * 0.99**self.updates
        with torch.no_grad():
            action, density = self.act(batch["next"], batch["noise"][0])
            target = batch["reward"] + 0.9 * (self.judge(self.slow, batch["next"], action).amin(0) - weight * density)
        if "actions drawn first" in self.way:
            action, density = self.act(batch["seen"], batch["noise"][1])
        loop.forget(criticising)
        errors = (self.judge(self.critics, batch["seen"], batch["action"]) - target).square().mean(1)
        if "one backward for each critic" in self.way:
            loop.backward(errors[0], criticising, retain_graph=True)
            loop.backward(errors[1], criticising)
        else:
            loop.backward(errors.sum(), criticising)
        loop.apply(criticising)
        loop.forget(acting)
        if "actions drawn first" not in self.way:
            action, density = self.act(batch["seen"], batch["noise"][1])
        loss = loop.backward(
            (weight * density - self.judge(self.critics, batch["seen"], action).amin(0)).mean(), acting
        )
        loop.apply(acting)
        loop.forget(tempering)
        heat = loop.backward(-self.temperature * (density.detach() + 2.0).mean(), tempering)
        loop.apply(tempering)
        self.follow()
        return {"critics": errors.detach().sum(), "actor": loss, "temperature": heat}

    def follow(self):
        slow, fast = [*self.slow.parameters()], [*self.critics.parameters()]
        with torch.no_grad():
            if "slow copies by foreach" in self.way:
                torch._foreach_mul_(slow, 0.95)
                torch._foreach_add_(slow, fast, alpha=0.05)
                return
            for one, other in zip(slow, fast, strict=True):
                if "slow copies by lerp" in self.way:
                    one.lerp_(other, 0.05)
                else:
                    one.mul_(0.95).add_(other, alpha=0.05)


class ProximalPolicy(Model):
    """Three passes over one batch with a clipped ratio, an entropy and a value."""

    optimizer = partial(optim.Adam, lr=3e-3, eps=1e-5)
    own = ("ratio without a logarithm", "entropy from torch.distributions", "one product for both heads")

    @staticmethod
    def batch(draw):
        return {
            "seen": torch.randn(16, OBSERVED, generator=draw),
            "action": torch.randint(4, (16,), generator=draw),
            "advantage": torch.randn(16, generator=draw),
            "gain": torch.randn(16, generator=draw),
        }

    def __init__(self, way):
        super().__init__(way)
        self.body, self.policy, self.value = nn.Linear(OBSERVED, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def decide(self, seen):
        hidden = self.body(seen).tanh()
        if "one product for both heads" in self.way:
            weight, bias = (
                torch.cat([getattr(h, name) for h in (self.policy, self.value)]) for name in ("weight", "bias")
            )
            logits, value = functional.linear(hidden, weight, bias).split([4, 1], 1)
        else:
            logits, value = self.policy(hidden), self.value(hidden)
        return logits.log_softmax(1), value[:, 0]

    def step(self, loop, batch):
        (optimizer,) = loop.optimizers.values()
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
        with torch.no_grad():
            before = self.decide(batch["seen"])[0].gather(1, batch["action"][:, None])[:, 0]
        found = []
        for _ in range(3):
            logs, value = self.decide(batch["seen"])
            now = logs.gather(1, batch["action"][:, None])[:, 0]
            ratio = now.exp() / before.exp() if "ratio without a logarithm" in self.way else (now - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            if "entropy from torch.distributions" in self.way:
                entropy = torch.distributions.Categorical(logits=logs).entropy().mean()
            else:
                entropy = -(logs.exp() * logs).sum(1).mean()
            loss = -gain + 0.5 * functional.mse_loss(value, batch["gain"]) - 0.01 * entropy
            loop.forget(optimizer)
            found.append(loop.backward(loss, optimizer))
            loop.apply(optimizer)
        return torch.stack(found)
