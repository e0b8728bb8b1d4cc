"""Convolutional models."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional

from zoo.model import Model


def pictures(draw, rows=8, channels=3, size=8):
    x = torch.randn(rows, channels, size, size, generator=draw)
    return {"x": x, "y": torch.randint(4, (rows,), generator=draw)}


def convolve(x, layer):
    """The same as a 3x3 convolution with padding, by one matrix product."""
    columns = functional.unfold(x, 3, padding=1)
    out = layer.weight.flatten(1) @ columns
    return out.unflatten(2, x.shape[2:]) + layer.bias[:, None, None]


def laid_out(model, x):
    """Images in the memory format of the model's parameters."""
    return x.contiguous(memory_format=torch.channels_last) if "channels_last" in model.way else x


class ConvNet(Model):
    """Convolution with a bias, batch normalisation, pooling."""

    optimizer = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
    own = ("channels_last", "convolution as a product", "pooling by amax", "inductor")
    without = ("checkpoint", "func.grad")  # which count a batch twice, and refuse to write to a buffer
    batch = staticmethod(pictures)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8 * 16, 4)
        if "channels_last" in way:
            self.to(memory_format=torch.channels_last)

    def forward(self, batch):
        x = laid_out(self, batch["x"])
        x = convolve(x, self.one) if "convolution as a product" in self.way else self.one(x)
        x = self.norm(x).relu()
        if "pooling by amax" in self.way:
            x = x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).amax((3, 5))
        else:
            x = functional.max_pool2d(x, 2)
        return functional.cross_entropy(self.head(x.flatten(1)), batch["y"])


class SharedBlock(Model):
    """One residual block, depthwise and pointwise with group normalisation, is applied three times."""

    optimizer = partial(optim.AdamW, lr=5e-3)
    own = ("channels_last", "written-out normalisation", "pointwise by einsum", "blocks recomputed")
    rows = True
    batch = staticmethod(pictures)

    def __init__(self, way):
        super().__init__(way)
        self.stem, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.pointwise, self.head = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        if "channels_last" in way:
            self.to(memory_format=torch.channels_last)

    def block(self, x):
        hidden = self.depthwise(x)
        if "written-out normalisation" in self.way:
            grouped = hidden.unflatten(1, (2, 4)).flatten(2)
            variance, mean = torch.var_mean(grouped, 2, correction=0, keepdim=True)
            hidden = ((grouped - mean) / (variance + self.norm.eps).sqrt()).view_as(hidden)
            hidden = hidden * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]
        else:
            hidden = self.norm(hidden)
        hidden = functional.silu(hidden)
        if "pointwise by einsum" in self.way:
            weight = self.pointwise.weight[:, :, 0, 0]
            return x + torch.einsum("bihw,oi->bohw", hidden, weight) + self.pointwise.bias[:, None, None]
        return x + self.pointwise(hidden)

    def forward(self, batch):
        x = self.stem(batch["x"])
        for _ in range(3):
            if "blocks recomputed" in self.way:
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            else:
                x = self.block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), batch["y"])


class ImageAutoencoder(Model):
    """Strided and transposed convolutions, instance normalisation."""

    optimizer = partial(optim.Adam, lr=5e-3)
    own = ("channels_last", "loss by rows", "in-place activations")
    rows = True

    @staticmethod
    def batch(draw):
        return {"x": torch.randn(8, 2, 8, 8, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.down, self.up = nn.Conv2d(2, 6, 4, stride=2, padding=1), nn.ConvTranspose2d(6, 2, 4, stride=2, padding=1)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        if "channels_last" in way:
            self.to(memory_format=torch.channels_last)

    def forward(self, batch):
        x = laid_out(self, batch["x"])
        hidden = functional.leaky_relu(self.norm(self.down(x)), 0.2, inplace="in-place activations" in self.way)
        error = self.up(hidden) - batch["x"]
        return error.abs().mean((1, 2, 3)).mean() if "loss by rows" in self.way else error.abs().mean()


class Contrastive(Model):
    """InfoNCE between two views, with a learned temperature."""

    optimizer = partial(optim.Adafactor, lr=1e-2)
    own = ("log-sum-exp", "written-out cosine", "views in one call", "einsum")

    @staticmethod
    def batch(draw):
        x = torch.randn(16, 6, generator=draw)
        return {"x": x, "view": x + 0.1 * torch.randn(16, 6, generator=draw)}

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.temperature = nn.Parameter(torch.full((1,), 1.5))

    def normal(self, x):
        if "written-out cosine" in self.way:
            return x / x.square().sum(1, keepdim=True).sqrt()
        return functional.normalize(x, dim=1)

    def forward(self, batch):
        if "views in one call" in self.way:
            one, two = self.body(torch.cat([batch["x"], batch["view"]])).chunk(2)
        else:
            one, two = self.body(batch["x"]), self.body(batch["view"])
        one, two = self.normal(one), self.normal(two)
        similar = torch.einsum("ac,bc->ab", one, two) if "einsum" in self.way else one @ two.t()
        similar = similar * self.temperature.exp()
        if "log-sum-exp" in self.way:
            return (similar.logsumexp(1) + similar.logsumexp(0) - 2 * similar.diagonal()).mean() / 2
        target = torch.arange(len(similar))
        return (functional.cross_entropy(similar, target) + functional.cross_entropy(similar.t(), target)) / 2
