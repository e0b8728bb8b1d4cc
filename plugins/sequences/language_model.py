"""What every language model shares: its loss, its measure, and how it writes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, GradientLearner, Loss, Mean, Progress

Decoder = Callable[[Tensor], Tensor]
"""Takes the next symbol of every row, [B], and answers with the logits of the one after it, [B, vocabulary]."""


class LanguageModel(GradientLearner):
    """Cross-entropy of every symbol of a window but the first."""

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Its sum, in nats, over all symbols."""
        tokens = batch["tokens"]
        logits, target = self.slots.forward(tokens[:, :-1]), tokens[:, 1:]
        return Loss(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel())

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """The loss by the name of what it is counted in."""
        return {"nats_per_character": super().metrics(batch)["loss"]}

    def inputs(self, batch: Batch) -> Tensor:
        """All symbols of a window but the last."""
        tokens: Tensor = batch["tokens"]
        return tokens[:, :-1]

    @abstractmethod
    def decoder(self) -> Decoder:
        """Begins to read symbol by symbol, in evaluation mode and without gradients."""

    @torch.no_grad()
    def write(self, prompt: Tensor, count: int, temperature: float = 1.0) -> Tensor:
        """Goes on with a text, drawing from torch's global generator.

        Args:
            prompt: symbols to begin with, [B, T], at least one.
            count: how many symbols to draw, at least one.
            temperature: what logits are divided by; below 1, likely symbols become likelier.

        Returns:
            The drawn symbols, [B, count].
        """
        written: list[Tensor] = []
        with self.evaluating():
            decode = self.decoder()
            for symbols in prompt.unbind(1):
                logits = decode(symbols)
            for _ in range(count):
                logits = decode(written[-1]) if written else logits
                written.append(torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(1))
        return torch.stack(written, 1)
