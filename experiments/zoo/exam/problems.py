"""Base problems: a layer, a language model, simulated ranks, and a learner with averaged weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.proof import Subject

Batch = dict[str, Tensor]
FEATURES = 16
ROWS = 32
VOCABULARY = 12
LENGTH = 10
SEQUENCES = 8
SEED = 3


@dataclass
class Learner:
    """What a training step changes.

    Attributes:
        model: The trained module.
        optimizer: Its optimizer.
        others: Further objects with a state, by name.
        memory: Values that are in no state.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


Update = Callable[[Learner, Batch], Any]


@dataclass(frozen=True)
class Problem:
    """A training step and its data. A call builds it, always with the same start.

    Attributes:
        make: Makes the learner.
        update: Trains the learner on a batch, and returns what a training logs.
        draw: Draws a batch.
    """

    make: Callable[[], Learner]
    update: Update
    draw: Callable[[torch.Generator], Batch]

    def __call__(self) -> Subject:
        torch.manual_seed(SEED)
        learner = self.make()
        state = {"model": learner.model, "optimizer": learner.optimizer, **learner.others}
        return Subject(partial(self.update, learner), state)

    def batches(self, count: int = 12, seed: int = 1) -> list[Batch]:
        """Returns batches of the default type."""
        generator = torch.Generator().manual_seed(seed)
        return [self.draw(generator) for _ in range(count)]

    def with_update(self, update: Update) -> "Problem":
        """Returns the problem with another step."""
        return replace(self, update=update)


class Layer(nn.Module):
    """Two linear maps with a buffer of running means and a number of calls."""

    def __init__(self, width: int = FEATURES):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("running", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


Forward = Callable[[Layer, Tensor], Tensor]


def draw_rows(generator: torch.Generator, rows: int = ROWS, width: int = FEATURES) -> Batch:
    x = torch.randn(rows, width, generator=generator)
    return {"x": x, "y": torch.randn(rows, width, generator=generator)}


def make_layer(width: int = FEATURES) -> Learner:
    model = Layer(width)
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fit(learner: Learner, batch: Batch, *, forward: Forward) -> dict[str, Tensor]:
    """Fits the output of a layer to targets by a step of gradient descent."""
    learner.optimizer.zero_grad()
    output = forward(learner.model, batch["x"])
    loss = functional.mse_loss(output, batch["y"])
    loss.backward()
    learner.optimizer.step()
    learner.model.calls += 1
    return {"output": output.detach(), "loss": loss.detach()}


def layer_problem(forward: Forward, draw: Callable[[torch.Generator], Batch] = draw_rows) -> Problem:
    """Returns a training step of a layer with this forward pass."""
    return Problem(make_layer, partial(fit, forward=forward), draw)


def with_forward(forward: Forward) -> Callable[[Problem], Problem]:
    """Returns a change that replaces the forward pass of a layer."""
    return lambda baseline: baseline.with_update(partial(fit, forward=forward))


class TokenModel(nn.Module):
    """A bigram model with a hidden layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.hidden = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens)).tanh())


def draw_tokens(generator: torch.Generator, sequences: int = SEQUENCES) -> Batch:
    """Draws sequences of different lengths; the mask is 1 where a token is to be learned."""
    tokens = torch.randint(VOCABULARY, (sequences, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (sequences, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).to(torch.get_default_dtype())
    return {"tokens": tokens, "mask": mask}


def make_token_learner() -> Learner:
    model = TokenModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.1, total_iters=50)
    return Learner(model, optimizer, {"schedule": schedule})


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the loss of every token, zero where the mask is zero."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses * batch["mask"]


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return token_losses(model, batch).sum() / batch["mask"].sum().clamp(min=1)


def clip(learner: Learner, limit: float = 0.25) -> Tensor:
    return nn.utils.clip_grad_norm_(learner.model.parameters(), limit)


def train_tokens(learner: Learner, batch: Batch) -> dict[str, Tensor]:
    """Trains on the mean loss of all tokens of a batch."""
    learner.optimizer.zero_grad()
    loss = token_mean(learner.model, batch)
    loss.backward()
    clip(learner)
    learner.optimizer.step()
    learner.others["schedule"].step()
    return {"loss": loss.detach()}


def split(batch: Batch, parts: int) -> list[Batch]:
    """Returns the batch in parts of rows."""
    columns = [tensor.tensor_split(parts) for tensor in batch.values()]
    return [dict(zip(batch, tensors, strict=True)) for tensors in zip(*columns, strict=True)]


class Classifier(nn.Module):
    """A small network with batch normalization."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


def draw_classes(generator: torch.Generator) -> Batch:
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return {"x": x, "y": torch.randint(4, (ROWS,), generator=generator)}


def make_averaged() -> Learner:
    model = Classifier()
    average = copy.deepcopy(model).requires_grad_(False)
    return Learner(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"average": average})


Average = Callable[[nn.Module, nn.Module], None]
DECAY = 0.95


@torch.no_grad()
def average_weights(average: nn.Module, model: nn.Module) -> None:
    """Moves averaged parameters towards the trained ones, and copies buffers."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(DECAY).add_(value, alpha=1 - DECAY)
    for copied, value in zip(average.buffers(), model.buffers(), strict=True):
        copied.copy_(value)


def train_averaged(learner: Learner, batch: Batch, *, move: Average = average_weights) -> dict[str, Tensor]:
    """Trains a classifier, and averages its weights after each step."""
    learner.optimizer.zero_grad()
    loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
    loss.backward()
    learner.optimizer.step()
    move(learner.others["average"], learner.model)
    return {"loss": loss.detach()}


def make_classifier(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Learner:
    model = Classifier()
    return Learner(model, optimizer(model.parameters(), **({"lr": 1e-2} | options)))


def train_classifier(learner: Learner, batch: Batch) -> dict[str, Tensor]:
    learner.optimizer.zero_grad()
    loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
    loss.backward()
    learner.optimizer.step()
    return {"loss": loss.detach()}


TOKENS = Problem(make_token_learner, train_tokens, draw_tokens)
AVERAGED = Problem(make_averaged, train_averaged, draw_classes)
CLASSIFIER = Problem(make_classifier, train_classifier, draw_classes)
