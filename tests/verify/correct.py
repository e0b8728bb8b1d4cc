"""Learners whose parameters, gradients and logged numbers are of less usual kinds."""

from typing import ClassVar, Literal

import torch
from torch import nn

from runner.api import GradientLearner, GradientLearnerConfig, Loss, Mean


class RotatedConfig(GradientLearnerConfig):
    """An embedding that a complex or real matrix multiplies."""

    kind: ClassVar[str] = "rotated"
    implementation = "Rotated"
    learns_from: ClassVar[str] = "words_and_numbers"
    complex: bool = False
    logs: Literal[
        "nothing", "a constant", "a number", "samples", "right answers", "a flag", "an integer", "the largest"
    ] = "nothing"


class Module(nn.Module):
    def __init__(self, complex_numbers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 3)
        dtype = torch.complex64 if complex_numbers else torch.get_default_dtype()
        self.matrix = nn.Parameter(torch.randn(6, 6, dtype=dtype) / 3)

    def forward(self, words):
        rotated = self.embedding(words).to(self.matrix.dtype) @ self.matrix
        return self.head(rotated.abs() if rotated.is_complex() else rotated)


class Rotated(GradientLearner):
    def build(self, config, shapes, context):
        return Module(config.complex)

    def loss(self, batch, noise, progress):
        logits = self.slots.forward(batch["word"])
        detached, rows = logits.detach(), len(logits)
        also = {
            "nothing": {},
            "a constant": {"logged": Mean(torch.tensor(0.3), 1)},
            "a number": {"logged": Mean(0.3, 1)},
            "samples": {"logged": Mean(detached.norm(dim=1).sum(), rows)},
            "right answers": {"logged": Mean((detached.argmax(1) == batch["label"]).sum(), rows)},
            "a flag": {"logged": Mean((detached > -1e9).any(), 1)},
            "an integer": {"logged": Mean(torch.tensor(100, dtype=torch.uint8), 1.0)},
            "the largest": {"logged": Mean(detached.abs().max(), 1)},
        }[self.config.logs]
        return Loss(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), rows, also)
