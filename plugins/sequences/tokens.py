"""Tokens of a file, as windows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.api import Learner, UsageError, fingerprint_of_files

from .text import help_texts
from .token_file import (
    TokenFileDescription,
    description_path,
    read_description,
    read_tokens,
)
from .windows import WindowSource, by_token, split

if TYPE_CHECKING:
    from .token_config import TokensConfig


class Tokens(WindowSource):
    """Adjacent windows of a file of tokens; its end is held out."""

    def datasets(self, config: TokensConfig) -> tuple[Any, Any]:
        """Returns the windows for training and those for evaluation.

        Raises:
            UsageError: The file or its description is missing, they do not fit, or the file is
                too short.
        """
        # Read in any case: a setting that nothing reads is refused, and this one has no default.
        name = config.file
        if config.synthetic:
            tokens, description = self._synthetic()
        else:
            tokens, description = self._read(config)
        context = config.context
        stride = config.stride or context
        # All bits of a token: they were read as signed numbers of the same size.
        mask = 2 ** (8 * description.item_bytes) - 1
        windows = split(tokens, context, stride, config.held_out, mask)
        if windows is None:
            problem = f"has {len(tokens):,} tokens, too few for windows of {context:,}"
            hint = "reduce data.context, or prepare more text"
            raise UsageError(f"data.file: {name} {problem}: {hint}")

        self.sizes = {"vocabulary": config.padded(description.vocabulary)}
        if description.characters is not None:
            self.classes = list(description.characters)
            codes = [ord(character) for character in description.characters]
            self.tables = {"characters": torch.tensor(codes, dtype=torch.int32)}
        return windows

    def _read(
        self, config: TokensConfig
    ) -> tuple[Tensor, TokenFileDescription]:
        path = config.require(config.file)
        description = read_description(path)
        tokens = torch.from_numpy(read_tokens(path, description))
        self._fingerprint = fingerprint_of_files([path, description_path(path)])
        return tokens, description

    def _synthetic(self) -> tuple[Tensor, TokenFileDescription]:
        content = help_texts().read_bytes()
        self._fingerprint = hashlib.sha256(content).hexdigest()
        tokens = np.frombuffer(content, np.uint8).astype(np.int16)
        description = TokenFileDescription(
            tokenizer="bytes", vocabulary=256, dtype="uint16"
        )
        return torch.from_numpy(tokens), description

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the metrics of the learner, by the token."""
        return by_token(super().evaluate(learner))

    def fingerprint(self) -> str:
        """Returns a digest of the file and its description."""
        return self._fingerprint
