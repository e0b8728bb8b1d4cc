"""Models of dense layers: normalised, dropped, tied, with several losses, in two types."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.utils import parametrizations

from zoo.model import Model


def regression(draw, rows=24, size=6, targets=2):
    return {"x": torch.randn(rows, size, generator=draw), "y": torch.randn(rows, targets, generator=draw)}


def classification(draw, rows=24, size=6, classes=5):
    x = torch.randn(rows, size, generator=draw)
    return {"x": x, "y": torch.randint(classes, (rows,), generator=draw)}


class Perceptron(Model):
    """Two hidden layers and a squared error."""

    optimizer = partial(optim.SGD, lr=0.1, momentum=0.9)
    own = ("in-place activations", "written-out layers", "mean from a sum", "no views of inputs", "inductor")
    rows = True
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.two, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def layer(self, layer, x):
        return x @ layer.weight.t() + layer.bias if "written-out layers" in self.way else layer(x)

    def forward(self, batch):
        x = batch["x"].t().contiguous().t() if "no views of inputs" in self.way else batch["x"]
        for layer in (self.one, self.two):
            x = functional.relu(self.layer(layer, x), inplace="in-place activations" in self.way)
        error = self.layer(self.head, x) - batch["y"]
        return error.square().sum() / error.numel() if "mean from a sum" in self.way else error.square().mean()


class Smoothed(Model):
    """A classifier with smoothed labels, by Nesterov's momentum."""

    optimizer = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    own = ("log-sum-exp", "soft targets")
    rows = True
    batch = staticmethod(classification)

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, batch):
        x, y = self.body(batch["x"]), batch["y"]
        if "soft targets" in self.way:
            return functional.cross_entropy(x, functional.one_hot(y, 5).to(x.dtype) * 0.9 + 0.02)
        if "log-sum-exp" in self.way:
            picked = x.gather(1, y[:, None])[:, 0]
            return (x.logsumexp(1) - 0.9 * picked - 0.1 * x.mean(1)).mean()
        return functional.cross_entropy(x, y, label_smoothing=0.1)


class Dropped(Model):
    """Dropout, drawn inside the step."""

    optimizer = partial(optim.AdamW, lr=1e-2)
    own = ("written-out mask",)
    without = ("func.grad",)  # torch.func has random numbers of its own
    batch = staticmethod(classification)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.two = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, batch):
        hidden = self.one(batch["x"]).relu()
        if "written-out mask" in self.way:
            hidden = hidden * torch.empty_like(hidden).bernoulli_(0.75).div_(0.75)
        else:
            hidden = functional.dropout(hidden, 0.25)
        return functional.cross_entropy(self.two(hidden), batch["y"])


class BatchNormed(Model):
    """Biases before batch normalisation, whose gradients are zero but for rounding, and Adam, which divides by them."""

    optimizer = partial(optim.Adam, lr=1e-2)
    own = ("written-out normalisation",)
    without = ("checkpoint", "func.grad")  # which count a batch twice, and refuse to write to a buffer
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.norm, self.two = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, batch):
        x, norm = self.one(batch["x"]), self.norm
        if "written-out normalisation" in self.way:
            variance, mean = torch.var_mean(x, 0, correction=0)
            with torch.no_grad():
                norm.running_mean.mul_(0.9).add_(0.1 * mean)
                norm.running_var.mul_(0.9).add_(0.1 * variance * (len(x) / (len(x) - 1)))
                norm.num_batches_tracked += 1
            x = (x - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
        else:
            x = norm(x)
        return functional.mse_loss(self.two(x.relu()), batch["y"])


class WeightNormed(Model):
    """Weights as lengths and directions."""

    optimizer = partial(optim.Adagrad, lr=0.1)
    own = ("written-out weights",)
    rows = True
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.direction, self.length = nn.Parameter(torch.randn(16, 6)), nn.Parameter(torch.ones(16, 1))
        self.head = nn.Linear(16, 2)

    def forward(self, batch):
        if "written-out weights" in self.way:
            weight = self.direction * (self.length / self.direction.square().sum(1, keepdim=True).sqrt())
        else:
            weight = torch._weight_norm(self.direction, self.length, 0)
        return functional.mse_loss(self.head(functional.gelu(batch["x"] @ weight.t())), batch["y"])


class SpectralNormed(Model):
    """Weights divided by their largest singular value, which buffers follow."""

    optimizer = partial(optim.RMSprop, lr=1e-2, momentum=0.5)
    own = ("in two halves",)
    without = ("checkpoint", "func.grad")  # the buffers move at every call
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.two = (parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, batch):
        x = functional.leaky_relu(self.one(batch["x"]), 0.1)
        if "in two halves" in self.way:
            weight = self.two.weight
            hidden = torch.cat([functional.linear(half, weight, self.two.bias) for half in x.chunk(2)])
        else:
            hidden = self.two(x)
        return functional.mse_loss(self.head(functional.leaky_relu(hidden, 0.1)), batch["y"])


class ManyTasks(Model):
    """Three heads on one body, each with a loss and a learned weight."""

    optimizer = partial(optim.NAdam, lr=1e-2)
    own = ("stacked heads", "one backward for each loss", "weights before the mean")
    batch = staticmethod(partial(regression, targets=3))

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.SiLU())
        self.heads = nn.ModuleList(nn.Linear(16, 1) for _ in range(3))
        self.scale = nn.Parameter(torch.zeros(3))

    def losses(self, batch):
        hidden = self.body(batch["x"])
        if "stacked heads" in self.way:
            weight = torch.stack([head.weight for head in self.heads])
            bias = torch.stack([head.bias for head in self.heads])
            out = torch.baddbmm(bias[:, None], hidden.expand(3, -1, -1), weight.transpose(1, 2))[..., 0].t()
        else:
            out = torch.cat([head(hidden) for head in self.heads], 1)
        error = (out - batch["y"]).square()
        if "weights before the mean" in self.way:
            return (error * (-self.scale).exp()).mean(0) + self.scale
        return (-self.scale).exp() * error.mean(0) + self.scale

    def forward(self, batch):
        return self.losses(batch).sum()

    def step(self, loop, batch):
        if "one backward for each loss" not in self.way:
            return loop.descend(batch)
        optimizer = loop.optimizers["optimizer"]
        loop.forget(optimizer)
        losses = self.losses(batch)
        for number, loss in enumerate(losses):
            loss.backward(retain_graph=number < 2)
        loop.apply(optimizer)
        return losses.detach().sum()


class Quantiles(Model):
    """Quantile regression; the quantiles are a buffer in float64, and so is the loss."""

    optimizer = partial(optim.Adamax, lr=1e-2)
    own = ("by the larger of two", "one quantile at a time")
    rows = True
    batch = staticmethod(partial(regression, targets=1))

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 7))
        self.register_buffer("quantile", (torch.arange(7, dtype=torch.float64) + 0.5) / 7)

    def forward(self, batch):
        error = batch["y"] - self.body(batch["x"]).double()
        if "by the larger of two" in self.way:
            return torch.maximum(self.quantile * error, (self.quantile - 1) * error).mean()
        if "one quantile at a time" in self.way:
            columns = zip(error.unbind(1), self.quantile, strict=True)
            return sum((torch.where(each < 0, q - 1, q) * each).mean() for each, q in columns) / 7
        return (torch.where(error < 0, self.quantile - 1, self.quantile) * error).mean()


class TiedAutoencoder(Model):
    """The decoder's weights are the encoder's, transposed."""

    optimizer = partial(optim.SGD, lr=0.05, weight_decay=1e-2)
    own = ("copied transpose", "einsum")
    rows = True

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(24, 10, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.encoder, self.bias = nn.Linear(10, 4), nn.Parameter(torch.zeros(10))

    def forward(self, batch):
        code, weight = self.encoder(batch["x"]).tanh(), self.encoder.weight
        if "einsum" in self.way:
            out = torch.einsum("bc,cx->bx", code, weight) + self.bias
        else:
            decoder = weight.t().contiguous() if "copied transpose" in self.way else weight.t()
            out = functional.linear(code, decoder, self.bias)
        return functional.mse_loss(out, batch["x"])
