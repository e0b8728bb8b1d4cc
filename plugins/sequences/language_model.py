"""Base class of language models: loss, metric, and generation of text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .config import TextResponse

if TYPE_CHECKING:
    from .config import LanguageModelConfig, TextRequest

Decoder = Callable[[Tensor], Tensor]
"""Takes the next symbols of every row, [B, T], and answers with the logits of the one after them, [B, vocabulary]."""
PROMPTS = ("To be, or not", "The ", "the ")
"""Prompts of the example, the first that fits the vocabulary."""


class LanguageModel(GradientLearner):
    """Cross-entropy of every symbol of a window but the first."""

    # In updates, logits stay inside of the compiled loss: those of a large vocabulary are never
    # stored in float32, and one kernel computes their loss. Predictions call the forward alone.
    compilable: ClassVar[tuple[str, ...]] = ("forward", "loss")

    def __init__(self, config: LanguageModelConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        super().__init__(config, shapes, context)
        symbols = context.tables.get("characters")
        self.characters = [] if symbols is None else [chr(code) for code in symbols.tolist()]
        """The characters of the symbols, if the source provides them."""

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the summed loss, in nats, over all symbols."""
        tokens = batch["tokens"]
        logits, target = self.slots.forward(tokens[:, :-1]), tokens[:, 1:]
        return Loss(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel())

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns the loss, named after the unit of its count."""
        return {"nats_per_character": super().metrics(batch)["loss"]}

    def inputs(self, batch: Batch) -> Tensor:
        """Returns all symbols of a window except the last."""
        tokens: Tensor = batch["tokens"]
        return tokens[:, :-1]

    @abstractmethod
    def decoder(self) -> Decoder:
        """Starts to read symbol by symbol, in evaluation mode and without gradients."""

    @torch.no_grad()
    def write(self, prompt: Tensor, draws: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Continues texts; the result of a row depends only on that row.

        Args:
            prompt: Initial symbols, [B, T], at least one.
            draws: Random numbers that select every further symbol, [B, count], uniform
                between 0 and 1.
            temperature: Divisor of logits, one for all or [B, 1]; below 1, likely
                symbols become likelier.

        Returns:
            The further symbols, [B, count].
        """
        written = []
        with self.evaluating():
            decode, symbols = self.decoder(), prompt
            for draw in torch.split(draws, 1, dim=1):
                shares = (decode(symbols).float() / temperature).softmax(-1).cumsum(-1)
                symbols = torch.searchsorted(shares, draw * shares[:, -1:]).clamp(max=shares.shape[1] - 1)
                written.append(symbols)
        return torch.cat(written, 1)

    def predict(self, inputs: Any) -> Any:
        """The logits of every symbol of windows; what comes after prompts, where inputs are those of ``write``."""
        return self.write(**inputs) if isinstance(inputs, Mapping) else super().predict(inputs)

    @torch.no_grad()
    def scores(self, inputs: Any) -> Tensor | None:
        """Returns the logits of the symbols after prompts, which are read again symbol by symbol.

        They do not depend on symbols that were sampled, in which rounding may change the text.

        Args:
            inputs: Of ``predict``.

        Returns:
            The logits [B, count, vocabulary]; None for inputs that are windows of symbols.
        """
        if not isinstance(inputs, Mapping):
            return None
        prompt = inputs["prompt"]
        positions = torch.arange(inputs["draws"].shape[1] - 1) % prompt.shape[1]
        pieces = [prompt, *prompt[:, positions, None].unbind(1)]
        with self.evaluating():
            decode = self.decoder()
            return torch.stack([decode(symbols) for symbols in pieces], dim=1)

    def refused(self, request: TextRequest) -> str | None:
        """A prompt has only characters that the model was trained on."""
        if not self.characters:
            return "this model was not trained on characters"
        unknown = sorted({*request.prompt} - {*self.characters})
        return f"prompt: this model has never seen {', '.join(map(repr, unknown))}" if unknown else None

    def example_request(self) -> Mapping[str, Any] | None:
        """Returns a short prompt of characters that the model was trained on."""
        known = {*self.characters}
        letters = "".join(character for character in self.characters if character.isalpha())
        prompts = (prompt for prompt in (*PROMPTS, letters[:8], self.characters[:1]) if prompt and {*prompt} <= known)
        prompt = next(prompts, None)
        return None if prompt is None else {"prompt": prompt, "characters": 100}

    def requested(self, requests: Sequence[TextRequest]) -> Mapping[str, Tensor]:
        """Returns the input of ``write``."""
        numbers = {character: number for number, character in enumerate(self.characters)}
        count = requests[0].characters
        draws = [torch.rand(count, generator=torch.Generator().manual_seed(each.seed)) for each in requests]
        inputs = {
            "prompt": torch.tensor([[numbers[character] for character in each.prompt] for each in requests]),
            "draws": torch.stack(draws),
            "temperature": torch.tensor([[each.temperature] for each in requests]),
        }
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def answered(self, requests: Sequence[TextRequest], outputs: Tensor) -> Sequence[TextResponse]:
        """Returns the texts after the prompts."""
        return [TextResponse(text=self.text(row)) for row in outputs]

    def text(self, symbols: Tensor) -> str:
        """Returns the text of symbols [T]."""
        return "".join(self.characters[symbol] for symbol in symbols.tolist())
