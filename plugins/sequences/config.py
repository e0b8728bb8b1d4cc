"""Configs of the language models and of their data."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from runner.api import (
    DataFile,
    DataName,
    GradientLearnerConfig,
    Objective,
    PublishedDatasetConfig,
    ServedRequest,
    ServedResponse,
    SourceOutline,
    TensorOutline,
    Unit,
)

from ..settings import Count, Heads

TINY_SHAKESPEARE = DataFile(
    name="tinyshakespeare.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    size=1_115_394,
    about="40,000 lines of Shakespeare's plays, put together by Andrej Karpathy "
    "(char-rnn, MIT); public domain",
)
TINY_VOCABULARY = 65
"""Characters that tiny Shakespeare uses."""


class TextRequest(ServedRequest):
    """A text that is to be continued."""

    prompt: Annotated[str, Field(min_length=1, max_length=2_000)]
    """The start of the text."""
    characters: Annotated[int, Field(ge=1, le=2_000)] = 200
    """Number of characters to write; requests that wait for the same batch take as long."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 0.8
    """Divisor of the logits: below 1, likely characters become likelier."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the text, which does not depend on other requests."""

    def group(self) -> Hashable:
        """Returns the length of the prompt and of the continuation, which a batch shares."""
        return len(self.prompt), self.characters


class TextResponse(ServedResponse):
    """The text after the prompt."""

    text: str


class LanguageModelConfig(GradientLearnerConfig, ABC):
    """Settings of models that predict the next token from those before it."""

    sample_losses: ClassVar[bool] = True
    learns_from: ClassVar[str] = "tokens"
    classifies: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {
            "kind": "adamw",
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }
    }
    headline: ClassVar[tuple[str, ...]] = ("nats_per_character",)
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "nats_*": (0, math.inf),
        "loss": (0, math.inf),
    }
    objective: ClassVar[Objective] = Objective(
        "nats_per_character", "minimize", margin=0.02, unit="nats"
    )
    request: ClassVar[type[ServedRequest]] = TextRequest
    response: ClassVar[type[ServedResponse]] = TextResponse
    page: ClassVar[str | None] = "page"


class GptConfig(LanguageModelConfig):
    """A transformer that predicts the next token from those before it (Radford et al. 2019,
    GPT-2).

    Normalisation precedes attention and the feed-forward layer, positions are trained, and the
    embedding is also the last layer.

    When it helps: text by the character, windows of up to some hundred tokens.
    When it hurts: long windows, because attention grows with their square; and small data, which it
    learns by heart.
    """

    kind: ClassVar[str] = "gpt"
    implementation = ".gpt:Gpt"

    layers: Count = 4
    """Blocks of attention and a feed-forward layer."""
    width: Count = 128
    """Size of the vector of a token between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the activations that is dropped in training."""

    def draws(self) -> bool:
        """Returns whether dropout is used."""
        return self.dropout > 0

    def reduced(self) -> Mapping[str, Any]:
        """Returns two blocks with at most four heads, 16 wide."""
        heads = min(self.heads, 4)
        return {
            "layers": min(self.layers, 2),
            "heads": heads,
            "width": min(self.width, 16 * heads),
        }


class Mamba2Config(LanguageModelConfig):
    """A state-space model that predicts the next token from those before it (Dao and Gu 2024,
    Mamba-2).

    Every block has a state of fixed size; how much of it is kept, taken in and read depends on the
    token. The baseline computes one token after the other; ``chunked_scan`` and
    ``associative_scan`` compute the same faster.

    When it helps: long windows, and writing token by token: neither time nor memory grows with the
    context length.
    When it hurts: what has to be looked up word for word, far back.
    """

    kind: ClassVar[str] = "mamba2"
    implementation = ".mamba2:Mamba2"
    slots: ClassVar[frozenset[str]] = LanguageModelConfig.slots | {"scan"}

    layers: Count = 2
    """Blocks."""
    width: Count = 64
    """Size of the vector of a token between the blocks."""
    expand: Count = 2
    """Factor by which the width is larger inside of a block."""
    head_width: Count = 32
    """Number of channels that share one rate of decay."""
    state: Count = 16
    """Size of the hidden state of a channel."""
    taps: Annotated[int, Field(ge=2)] = 4
    """Tokens that the convolution before the recurrence reads."""

    def reduced(self) -> Mapping[str, Any]:
        """Returns two blocks with two heads of at most 32 channels."""
        head_width = min(self.head_width, 32)
        return {
            "layers": min(self.layers, 2),
            "head_width": head_width,
            "width": min(self.width, 2 * head_width),
        }

    @field_validator("head_width")
    @classmethod
    def _divides_the_inner_width(
        cls, head_width: int, info: ValidationInfo
    ) -> int:
        inner = info.data.get("width", head_width) * info.data.get("expand", 1)
        if inner % head_width:
            raise ValueError(
                f"should divide the width inside of a block, {inner}"
            )
        return head_width


class TextConfig(PublishedDatasetConfig):
    """Any text in UTF-8, by the character; its end is held out.

    Training samples windows with random starts; evaluation predicts every held-out
    character once, in adjacent windows. The default file is tiny Shakespeare (``runner
    data get tinyshakespeare.txt``). With ``synthetic: true`` the text consists of
    Python's help texts, for tests.
    """

    kind: ClassVar[str] = "text"
    implementation = ".text:Text"
    provides: ClassVar[str] = "tokens"
    units: ClassVar[frozenset[Unit]] = frozenset(
        {"updates", "samples", "tokens"}
    )
    in_memory: ClassVar[bool] = True
    files: ClassVar[tuple[DataFile, ...]] = (TINY_SHAKESPEARE,)
    pictures: ClassVar[tuple[str, ...]] = (".txt",)

    file: DataName = TINY_SHAKESPEARE.name
    """A path, relative to the recipe; or the name of a file in the folders of data."""
    context: Annotated[int, Field(ge=1)] = 128
    """Characters of a window that the next ones are predicted from."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the text, at its end, that only evaluation sees."""

    def reduced(self) -> Mapping[str, Any]:
        """Returns windows of at most 32 characters."""
        return {"context": min(self.context, 32)}

    def wanted(self) -> tuple[DataFile, ...]:
        """Returns tiny Shakespeare, unless another file is named."""
        return tuple(file for file in self.files if file.name == self.file)

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of windows; the characters are counted if the text is there."""
        if self.synthetic:
            return None
        path = self.locate(self.file)
        if path is not None:
            text = path.read_text(encoding="utf-8", errors="replace")
            vocabulary = len(set(text))
            length = len(text)
        elif self.wanted():
            vocabulary = TINY_VOCABULARY
            length = TINY_SHAKESPEARE.size
        else:
            return None
        windows = int(length * (1 - self.held_out)) - self.context
        return SourceOutline(
            {"tokens": TensorOutline((batch_size, self.context + 1), "int64")},
            sizes={"vocabulary": vocabulary},
            tables={"characters": TensorOutline((vocabulary,), "int32")},
            epoch_samples=max(1, windows),
        )
