"""Training loops in plain PyTorch, small enough to be judged many times in a test."""

from dataclasses import dataclass, field

import torch
from torch import nn

from runner.proof import Subject


class Net(nn.Module):
    """Two layers whose parts are named, so that a test can break one of them."""

    def __init__(self, width=8):
        super().__init__()
        self.hidden = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.head(self.norm(self.hidden(x)).relu())


def forward(model, x):
    return model(x)


def backward(loss):
    loss.backward()


class Counter:
    """Something with a state that no step changes."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = dict(state)


@dataclass
class Loop:
    """What a subject is made of; a test replaces a part of it."""

    net: type = Net
    optimizer: object = torch.optim.Adam
    options: dict = field(default_factory=lambda: {"lr": 1e-2})
    forward: object = staticmethod(forward)
    backward: object = staticmethod(backward)
    forgets: bool = False
    """Whether gradients are forgotten at the end of a step."""
    schedule: bool = False
    named: bool = False
    """Whether the step tells what its parts return."""

    def __call__(self):
        torch.manual_seed(3)
        model = self.net()
        optimizer = self.optimizer(model.parameters(), **self.options)
        state = {"model": model, "optimizer": optimizer}
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if self.schedule else None
        if scheduler:
            state["scheduler"] = scheduler
        reports = []

        def tell(slot, output):
            for report in reports:
                report(slot, output)
            return output

        def step(batch):
            if not self.forgets:
                optimizer.zero_grad()
            prediction = tell("forward", self.forward(model, batch["x"]))
            loss = nn.functional.mse_loss(prediction, batch["y"])
            tell("backward", self.backward(loss))
            optimizer.step()
            if scheduler:
                scheduler.step()
            if self.forgets:
                optimizer.zero_grad()
            return {"loss": loss.detach(), "rate": optimizer.param_groups[0]["lr"]}

        return Subject(step, state, watch=reports.append if self.named else None)


def batches(count=8, size=16, seed=0):
    """Inputs and targets of the default type."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, 1, generator=generator)}
        for _ in range(count)
    ]
