"""Generative models: adversarial, variational, diffusing."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional

from zoo.model import Model


class Adversarial(Model):
    """A generator and a discriminator with an optimizer each."""

    optimizer = partial(optim.Adam, lr=5e-3, betas=(0.5, 0.999))
    own = ("softplus", "one backward for both losses", "real and fake in one call", "fake made once")
    without = ("flat gradients",)

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(16, 4, generator=draw), "noise": torch.randn(2, 16, 3, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def trained(self):
        return {"critic's": [*self.critic.parameters()], "generator's": [*self.generator.parameters()]}

    def cost(self, logits, real):
        if "softplus" in self.way:
            return functional.softplus(-logits if real else logits).mean()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def step(self, loop, batch):
        criticising, generating = loop.optimizers.values()
        loop.forget(criticising)
        with torch.set_grad_enabled("fake made once" in self.way):
            fake = self.generator(batch["noise"][0]).detach()
        if "real and fake in one call" in self.way:
            real_logits, fake_logits = self.critic(torch.cat([batch["x"], fake])).chunk(2)
        else:
            real_logits, fake_logits = self.critic(batch["x"]), self.critic(fake)
        costs = self.cost(real_logits, True), self.cost(fake_logits, False)
        if self.way & {"one backward for both losses", "real and fake in one call"}:
            cost = loop.backward(sum(costs), criticising)
        else:
            cost = sum(loop.backward(each, criticising) for each in costs)
        loop.apply(criticising)
        loop.forget(generating)
        loss = loop.backward(self.cost(self.critic(self.generator(batch["noise"][1])), True), generating)
        loop.apply(generating)
        return {"critic": cost, "generator": loss}


class Wasserstein(Model):
    """A critic whose loss is a difference of two means, nearly zero; its weights are clipped after every update."""

    optimizer = partial(optim.RMSprop, lr=5e-4)
    own = ("real and fake in one call", "means by sums", "clipped by foreach")
    without = ("func.grad",)

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(32, 4, generator=draw), "fake": 0.9 * torch.randn(32, 4, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, batch):
        if "real and fake in one call" in self.way:
            real, fake = self.critic(torch.cat([batch["x"], batch["fake"]])).chunk(2)
        else:
            real, fake = self.critic(batch["x"]), self.critic(batch["fake"])
        if "means by sums" in self.way:
            return (fake.sum() - real.sum()) / len(real)
        return fake.mean() - real.mean()

    def finish(self, loop):
        with torch.no_grad():
            if "clipped by foreach" in self.way:
                torch._foreach_clamp_min_([*self.parameters()], -0.3)
                torch._foreach_clamp_max_([*self.parameters()], 0.3)
                return
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class Variational(Model):
    """A variational autoencoder; its noise comes with the batch."""

    optimizer = partial(optim.Adam, lr=5e-3)
    own = ("divergence from torch.distributions", "deviation by a root", "two heads in one product")
    rows = True

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(16, 6, generator=draw), "noise": torch.randn(16, 2, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.encoder, self.mean, self.spread = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(16, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 6))

    def noise(self, batch, like):
        return batch["noise"]

    def forward(self, batch):
        hidden = self.encoder(batch["x"]).relu()
        if "two heads in one product" in self.way:
            weight, bias = (
                torch.cat([self.mean.weight, self.spread.weight]),
                torch.cat([self.mean.bias, self.spread.bias]),
            )
            mean, spread = functional.linear(hidden, weight, bias).chunk(2, 1)
        else:
            mean, spread = self.mean(hidden), self.spread(hidden)
        deviation = spread.exp().sqrt() if "deviation by a root" in self.way else (spread / 2).exp()
        out = self.decoder(mean + deviation * self.noise(batch, mean))
        if "divergence from torch.distributions" in self.way:
            normal = torch.distributions.Normal
            prior = normal(torch.zeros_like(mean), torch.ones_like(mean))
            divergence = torch.distributions.kl_divergence(normal(mean, deviation), prior).sum(1)
        else:
            divergence = (mean.square() + spread.exp() - 1 - spread).sum(1) / 2
        return ((out - batch["x"]).square().sum(1) + divergence).mean()


class NoisyInside(Variational):
    """The same with its noise drawn inside the step, where float64 draws other numbers."""

    own = ("two heads in one product",)
    without = ("func.grad", "micro-batches", "other order of rows", "aot_eager", "flat parameters", "flat gradients",
               "autograd.grad", "rate in a tensor", "foreach", "fused", "scaled loss", "zeroed gradients")  # fmt: skip
    rows = False

    def noise(self, batch, like):
        return torch.randn_like(like)


class Flow(Model):
    """A normalising flow: affine couplings and the logarithm of a determinant."""

    optimizer = partial(optim.Adam, lr=5e-3, weight_decay=1e-4)
    own = ("determinants summed in the end", "density from torch.distributions", "determinant by slogdet")
    rows = True

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(16, 4, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 4)) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, batch):
        x = batch["x"] @ self.mix
        # torch's derivative of logdet is that of slogdet; both are of one decomposition
        first = (
            torch.linalg.slogdet(self.mix)[1] if "determinant by slogdet" in self.way else self.mix.det().abs().log()
        )
        determinants = [first.expand(len(x))]
        for net in self.nets:
            one, two = x.chunk(2, 1)
            scale, shift = net(one).chunk(2, 1)
            determinants.append(scale.tanh().sum(1))
            x = torch.cat([two * scale.tanh().exp() + shift, one], 1)
        if "determinants summed in the end" in self.way:
            determinant = torch.stack(determinants, 1).sum(1)
        else:
            determinant = sum(determinants)
        if "density from torch.distributions" in self.way:
            return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + determinant).mean()
        constant = torch.log(torch.tensor(2 * torch.pi, dtype=x.dtype)) * 2
        return (x.square().sum(1) / 2 + constant - determinant).mean()
