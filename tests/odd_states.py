"""A learner whose state holds what is rarely in one: ``--plugin`` takes this file together with ``toys.py``."""

from collections import defaultdict
from typing import ClassVar

import torch
from torch import nn

from runner.api import GradientLearner, GradientLearnerConfig, Loss

EYE = torch.eye(3)
BUFFERS = {
    "sparse": EYE.to_sparse,
    "complex128": EYE.cdouble,
    "expanded": lambda: torch.arange(3.0).expand(5, 3),
    "expanded_inside": lambda: torch.arange(6.0).view(2, 1, 3).expand(2, 4, 3),
    "conjugate": lambda: (EYE.cfloat() * 1j).conj(),
    "float8": lambda: EYE.to(torch.float8_e4m3fn),
    "scalar": lambda: torch.tensor(3),
    "growing": lambda: torch.zeros(0, 2),
    "none": lambda: None,
    "late_fraction": lambda: torch.tensor(3),
    "versioned": lambda: torch.tensor(3),
}


class OddConfig(GradientLearnerConfig):
    """Guesses the next word, and keeps what few models keep."""

    kind: ClassVar[str] = "odd_state"
    implementation = "Odd"
    learns_from: ClassVar[str] = "toy_words"

    buffer: str = "scalar"
    """A name of ``BUFFERS``."""
    memory: str = "numbers"
    """What it remembers: numbers, tuples, functions, late, lost, or changed."""


class Negated(nn.Linear):
    """A layer whose states of version 1 had the opposite sign."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < self._version:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Net(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.layer = (Negated if buffer == "versioned" else nn.Linear)(1, 1)
        self.register_buffer("odd", BUFFERS[buffer]())
        self.buffer = buffer
        self.calls = 0

    def forward(self, words):
        if self.training:
            self.calls += 1
        # The first checkpoint has the type of the beginning.
        if self.buffer == "late_fraction" and self.calls > 1:
            self.odd = torch.tensor(0.5)
        if self.buffer in ("growing", "none") and self.training:
            before = torch.zeros(0, 2) if self.odd is None else self.odd
            self.odd = torch.cat([before, torch.ones(1, 2)])
        return self.layer(words)


class Odd(GradientLearner):
    def build(self, config, shapes, context):
        self.memory = defaultdict(int)
        if config.memory == "functions":
            self.memory["f"] = len
        return Net(config.buffer)

    def loss(self, batch, noise, progress):
        self.memory[("words", 1) if self.config.memory == "tuples" else "words"] += 1
        if self.config.memory == "late":
            self.memory["late"] = object()
        return Loss(self.slots.forward(self.inputs(batch)).square().sum(), len(batch["words"]))

    def inputs(self, batch):
        return batch["words"][:, :1].float()

    def state_dict(self):
        return super().state_dict() | {"memory": self.memory}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.config.memory != "lost":
            self.memory = state["memory"]
        if self.config.memory == "changed":
            self.memory = dict(self.memory)
