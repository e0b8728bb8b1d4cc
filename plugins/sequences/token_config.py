"""Settings of files of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from runner.api import (
    DataName,
    Objective,
    PublishedDatasetConfig,
    SourceOutline,
    TensorOutline,
    Unit,
    UsageError,
)

from .config import LanguageModelConfig

GPT2_VOCABULARY = 50_257
"""Tokens of GPT-2, which a plan assumes while the file is missing."""


class TokensConfig(PublishedDatasetConfig):
    """A file of tokens, as ``runner data prepare`` writes it; its end is held out.

    The file is mapped into memory, so it may be larger than the memory. An epoch reads each token
    once, in windows that follow each other, shuffled; evaluation predicts every held-out token
    once. With ``synthetic: true`` the tokens are the bytes of Python's help texts, for tests.
    """

    kind: ClassVar[str] = "tokens"
    implementation = ".tokens:Tokens"
    provides: ClassVar[str] = "tokens"
    units: ClassVar[frozenset[Unit]] = frozenset(
        {"updates", "samples", "tokens"}
    )
    in_memory: ClassVar[bool] = True
    prepares_text: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("nats_per_token",)
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = (
        LanguageModelConfig.bounds
    )
    objective: ClassVar[Objective | None] = Objective(
        "nats_per_token", "minimize", margin=0.02, unit="nats"
    )

    file: DataName
    """A path, relative to the recipe; or the name of a file in the folders of data."""
    context: Annotated[int, Field(ge=1)] = 1_024
    """Tokens of a window that the next ones are predicted from."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Tokens between the starts of two training windows; the context if it is not set."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of the tokens, at their end, that only evaluation sees."""
    vocabulary_multiple: Annotated[int, Field(ge=1, le=2**16)] = 1
    """The model's vocabulary is rounded up to a multiple of this number; 64 is faster on a GPU."""

    def reduced(self) -> Mapping[str, Any]:
        """Returns windows of at most 16 tokens, because a vocabulary may be large."""
        return {"context": min(self.context, 16)}

    def padded(self, vocabulary: int) -> int:
        """Returns the size of the model's vocabulary for that of the tokenizer."""
        multiple = self.vocabulary_multiple
        return math.ceil(vocabulary / multiple) * multiple

    def require(self, name: str) -> Path:
        """Returns the path of the file.

        Raises:
            UsageError: The file is missing. The message contains the command that prepares it.
        """
        # This module imports numpy, which commands that only read recipes do without.
        from .token_file import PREPARE

        path = self.locate(name)
        if path is None:
            hint = f"prepare it with: {PREPARE.format(name=Path(name).name)}"
            synthetic = "or train on generated data: data.synthetic=true"
            raise UsageError(
                f"data.file: {self.nowhere(name)}; {hint}; {synthetic}"
            )
        return path

    @classmethod
    def prepare_text(
        cls, texts: Sequence[Path], tokenizer: str, out: Path
    ) -> str:
        """Converts texts to a file of tokens, and returns a description for a person."""
        from .token_file import write_tokens

        description = write_tokens(texts, tokenizer, out)
        tokens = f"{description.tokens:,} tokens as {description.dtype}"
        vocabulary = f"a vocabulary of {description.vocabulary:,}"
        return f"{tokens}, {vocabulary} ({description.tokenizer})"

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of windows, without the file for the vocabulary of GPT-2."""
        if self.synthetic:
            return None
        from .token_file import read_description

        path = self.locate(self.file)
        # A plan is made before the data is prepared, so a missing file is not an error here.
        vocabulary = GPT2_VOCABULARY
        epoch_samples = None
        tables = {}
        if path is not None:
            description = read_description(path)
            vocabulary = description.vocabulary
            tokens = path.stat().st_size // description.item_bytes
            train_tokens = int(tokens * (1 - self.held_out))
            stride = self.stride or self.context
            windows = (train_tokens - 1 - self.context) // stride + 1
            epoch_samples = max(1, windows)
            if description.characters is not None:
                tables["characters"] = TensorOutline((vocabulary,), "int32")
        return SourceOutline(
            {"tokens": TensorOutline((batch_size, self.context + 1), "int64")},
            sizes={"vocabulary": self.padded(vocabulary)},
            tables=tables,
            epoch_samples=epoch_samples,
        )
