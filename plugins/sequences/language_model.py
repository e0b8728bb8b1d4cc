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
"""Takes the next tokens of every row, [B, T], and returns the logits of the token after them,
[B, vocabulary].
"""
PROMPTS = ("To be, or not", "The ", "the ")
"""Prompts of the example, the first that fits the vocabulary."""


class LanguageModel(GradientLearner):
    """Cross-entropy of every token of a window except the first."""

    # In updates, logits stay inside of the compiled loss: those of a large vocabulary are never
    # stored in float32, and one kernel computes their loss. Predictions call the forward alone.
    compilable: ClassVar[tuple[str, ...]] = ("forward", "loss")

    def __init__(
        self,
        config: LanguageModelConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> None:
        super().__init__(config, shapes, context)
        codes = context.tables.get("characters")
        self.characters = (
            [] if codes is None else [chr(code) for code in codes.tolist()]
        )
        """The characters of the tokens, if the source provides them."""

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the summed loss, in nats, over all tokens."""
        tokens = batch["tokens"]
        logits = self.slots.forward(tokens[:, :-1])
        target = tokens[:, 1:]
        # A sum with its count adds up to the same loss for micro-batches of any size.
        total = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="sum"
        )
        samples = self.sample_losses(
            lambda: F.cross_entropy(
                logits.transpose(1, 2), target, reduction="none"
            ).mean(1)
        )
        return Loss(total, target.numel(), samples=samples)

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns the loss, named after the unit of its count."""
        return {"nats_per_character": super().metrics(batch)["loss"]}

    def inputs(self, batch: Batch) -> Tensor:
        """Returns all tokens of a window except the last."""
        tokens: Tensor = batch["tokens"]
        return tokens[:, :-1]

    @abstractmethod
    def decoder(self) -> Decoder:
        """Returns a new decoder. It is called in evaluation mode and without gradients."""

    @torch.no_grad()
    def write(
        self, prompt: Tensor, draws: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """Continues texts; the result of a row depends only on that row.

        Args:
            prompt: Initial tokens, [B, T], at least one.
            draws: Random numbers that select every further token, [B, count], uniform
                between 0 and 1.
            temperature: Divisor of logits, one for all or [B, 1]; below 1, likely
                tokens become likelier.

        Returns:
            The further tokens, [B, count].
        """
        generated = []
        tokens = prompt
        with self.evaluating():
            decode = self.decoder()
            for draw in torch.split(draws, 1, dim=1):
                logits = decode(tokens).float() / temperature
                cumulative = logits.softmax(-1).cumsum(-1)
                # Rounding may leave the last sum below 1, so the draw is scaled to it.
                threshold = draw * cumulative[:, -1:]
                tokens = torch.searchsorted(cumulative, threshold)
                tokens = tokens.clamp(max=cumulative.shape[1] - 1)
                generated.append(tokens)
        return torch.cat(generated, 1)

    def predict(self, inputs: Any) -> Any:
        """Returns the logits of every token of windows, or what follows prompts.

        Args:
            inputs: Windows of tokens, [B, T], or the arguments of ``write``.
        """
        if isinstance(inputs, Mapping):
            return self.write(**inputs)
        return super().predict(inputs)

    @torch.no_grad()
    def scores(self, inputs: Any) -> Tensor | None:
        """Returns the logits of the tokens after prompts, which are read again token by token.

        They do not depend on tokens that were sampled, in which rounding may change the text.

        Args:
            inputs: As for ``predict``.

        Returns:
            The logits [B, count, vocabulary]; None for inputs that are windows of tokens.
        """
        if not isinstance(inputs, Mapping):
            return None
        prompt = inputs["prompt"]
        count = inputs["draws"].shape[1]
        positions = torch.arange(count - 1) % prompt.shape[1]
        # Any tokens serve, if they do not depend on the model: those of the prompt again.
        pieces = [prompt, *prompt[:, positions, None].unbind(1)]
        with self.evaluating():
            decode = self.decoder()
            return torch.stack([decode(tokens) for tokens in pieces], dim=1)

    def refused(self, request: TextRequest) -> str | None:
        """Returns why a prompt is refused: the model was not trained on its characters."""
        if not self.characters:
            return "this model was not trained on characters"
        unknown = sorted(set(request.prompt) - set(self.characters))
        if not unknown:
            return None
        return (
            f"prompt: this model has never seen {', '.join(map(repr, unknown))}"
        )

    def example_request(self) -> Mapping[str, Any] | None:
        """Returns a short prompt of characters that the model was trained on."""
        vocabulary = set(self.characters)
        letters = [
            character for character in self.characters if character.isalpha()
        ]
        for prompt in (
            *PROMPTS,
            "".join(letters[:8]),
            "".join(self.characters[:1]),
        ):
            if prompt and vocabulary.issuperset(prompt):
                return {"prompt": prompt, "characters": 100}
        return None

    def requested(
        self, requests: Sequence[TextRequest]
    ) -> Mapping[str, Tensor]:
        """Returns the input of ``write``."""
        numbers = {
            character: number
            for number, character in enumerate(self.characters)
        }
        prompts = []
        draws = []
        for request in requests:
            prompts.append([numbers[character] for character in request.prompt])
            # A generator per request makes a text independent of the others in its batch.
            generator = torch.Generator().manual_seed(request.seed)
            draws.append(torch.rand(request.characters, generator=generator))
        temperatures = [[request.temperature] for request in requests]
        return {
            "prompt": torch.tensor(prompts).to(self.device),
            "draws": torch.stack(draws).to(self.device),
            "temperature": torch.tensor(temperatures).to(self.device),
        }

    def answered(
        self, requests: Sequence[TextRequest], outputs: Tensor
    ) -> Sequence[TextResponse]:
        """Returns the texts after the prompts."""
        return [TextResponse(text=self.text(row)) for row in outputs]

    def text(self, tokens: Tensor) -> str:
        """Returns the text of tokens [T]."""
        return "".join(self.characters[token] for token in tokens.tolist())
