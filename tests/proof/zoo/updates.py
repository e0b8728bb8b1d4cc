"""Models whose update is more than a gradient and an optimizer: clipped, averaged, accumulated, written by hand."""

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional

from zoo.dense import classification, regression
from zoo.model import BACKWARD, OPTIMIZER, Model


class Clipped(Model):
    """The gradients' norm is clipped, and the rate follows OneCycle."""

    optimizer = partial(optim.Adam, lr=1e-2, amsgrad=True)
    own = ("clipped one by one", "clipped by foreach", "written-out clipping")
    rows = True
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 2))

    def forward(self, batch):
        return functional.smooth_l1_loss(self.body(batch["x"]), batch["y"])

    def adjust(self, loop):
        if "written-out clipping" in self.way:
            gradients = [each.grad for each in self.parameters()]
            norm = torch.cat([each.flatten() for each in gradients]).square().sum().sqrt()
            for each in gradients:
                each.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
        else:
            foreach = {"clipped one by one": False, "clipped by foreach": True}.get(next(iter(self.way), ""))
            nn.utils.clip_grad_norm_(self.parameters(), 0.1, foreach=foreach)

    def finish(self, loop):
        loop.more["scheduler"].step()

    def more_state(self, loop):
        return {"scheduler": optim.lr_scheduler.OneCycleLR(loop.optimizers["optimizer"], 2e-2, total_steps=50)}


class Averaged(Model):
    """The parameters have a running mean, and the rate follows a cosine."""

    optimizer = partial(optim.RAdam, lr=1e-2)
    own = ("mean by two operations", "mean by foreach")
    rows = True
    batch = staticmethod(classification)

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 5))

    def forward(self, batch):
        return functional.cross_entropy(self.body(batch["x"]), batch["y"])

    def finish(self, loop):
        loop.more["scheduler"].step()
        averages, values = [*loop.more["mean"].parameters()], [*self.parameters()]
        with torch.no_grad():
            if "mean by foreach" in self.way:
                torch._foreach_lerp_(averages, values, 0.05)
                return
            for average, value in zip(averages, values, strict=True):
                if "mean by two operations" in self.way:
                    average.mul_(0.95).add_(value, alpha=0.05)
                else:
                    average.lerp_(value, 0.05)

    def more_state(self, loop):
        mean = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 5)).requires_grad_(False)
        mean.load_state_dict(self.body.state_dict())
        return {"mean": mean, "scheduler": optim.lr_scheduler.CosineAnnealingLR(loop.optimizers["optimizer"], 20)}


class ByHand(Model):
    """Gradient descent without an optimizer."""

    own = ("foreach by hand", "new tensors", "one operation")
    without = (*OPTIMIZER, *set(BACKWARD) - {"flat parameters"})
    rows = True
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 2))

    def trained(self):
        return {}

    def forward(self, batch):
        return functional.mse_loss(self.body(batch["x"]), batch["y"])

    def step(self, loop, batch):
        parameters = [*self.parameters()]
        loss = loop.loss(batch)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            if "foreach by hand" in self.way:
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
                if "new tensors" in self.way:
                    parameter.copy_(parameter - 0.1 * gradient)
                elif "one operation" in self.way:
                    parameter.add_(gradient, alpha=-0.1)
                elif "foreach by hand" not in self.way:
                    parameter -= 0.1 * gradient
        return loss.detach()


class Accumulated(Model):
    """The gradients of four micro-batches are added up before an update."""

    optimizer = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
    own = ("whole batch", "one division in the end", "two larger parts", "backward for all together")
    batch = staticmethod(classification)

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, batch):
        return functional.cross_entropy(self.body(batch["x"]), batch["y"])

    def step(self, loop, batch):
        optimizer = loop.optimizers["optimizer"]
        loop.forget(optimizer)
        count = next((count for way, count in (("whole batch", 1), ("two larger parts", 2)) if way in self.way), 4)
        parts = [{name: rows.chunk(count)[i] for name, rows in batch.items()} for i in range(count)]
        if "backward for all together" in self.way:
            loss = loop.backward(sum(self(part) for part in parts) / count, optimizer)
        elif "one division in the end" in self.way:
            loss = sum(loop.backward(self(part), optimizer) for part in parts) / count
            for parameter in self.parameters():
                parameter.grad /= count
        else:
            loss = sum(loop.backward(self(part) / count, optimizer) for part in parts)
        loop.apply(optimizer)
        return loss


class Penalised(Model):
    """The loss holds the gradient of the output with respect to the input: a gradient through a gradient."""

    optimizer = partial(optim.Adam, lr=1e-2, betas=(0.5, 0.9))
    own = ("gradient by torch.func", "norm by square and root")
    without = ("checkpoint", "func.grad", "aot_eager")  # there is a gradient inside
    rows = True
    batch = staticmethod(partial(regression, targets=1))

    def __init__(self, way):
        super().__init__(way)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch):
        x = batch["x"].detach().requires_grad_()
        if "gradient by torch.func" in self.way:
            gradient = torch.func.vmap(torch.func.grad(lambda row: self.body(row)[0]))(x)
        else:
            (gradient,) = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)
        by_root = "norm by square and root" in self.way
        norm = gradient.square().sum(1).sqrt() if by_root else gradient.norm(dim=1)
        return functional.mse_loss(self.body(x), batch["y"]) + ((norm - 1) ** 2).mean()


class Orthogonalised(Model):
    """Muon: the momentum of every matrix is made orthogonal, in bfloat16."""

    optimizer = partial(optim.Muon, lr=1e-2, weight_decay=0.0)
    own = ("written-out layers",)
    without = ("rate in a tensor",)
    rows = True
    batch = staticmethod(regression)

    def __init__(self, way):
        super().__init__(way)
        self.one, self.two = nn.Linear(6, 16, bias=False), nn.Linear(16, 2, bias=False)

    def forward(self, batch):
        if "written-out layers" in self.way:
            return ((batch["x"] @ self.one.weight.t()).relu() @ self.two.weight.t() - batch["y"]).square().mean()
        return functional.mse_loss(self.two(self.one(batch["x"]).relu()), batch["y"])
