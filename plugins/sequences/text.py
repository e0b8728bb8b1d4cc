"""Text in memory, as windows of characters."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.api import Learner, UsageError

from .language_model import LanguageModel
from .windows import Windows, WindowSource, split

if TYPE_CHECKING:
    from .config import TextConfig

PROMPT = 64
"""Characters of the held-out text with which a rendered text starts."""
WRITTEN = 1_000
"""Characters of its continuation."""
TEMPERATURE = 0.8
"""Divisor of the logits for the continuation."""


class Text(WindowSource):
    """Windows with random starts for training, and adjacent ones for evaluation."""

    def datasets(self, config: TextConfig) -> tuple[Any, Any]:
        """Returns the windows for training and those for evaluation.

        Raises:
            UsageError: The file is missing, it is not UTF-8, or it is too short.
        """
        path = help_texts() if config.synthetic else config.require(config.file)
        content = path.read_bytes()
        self._digest = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at byte {error.start}"
            raise UsageError(
                f"data.file: {path} is not text in UTF-8: {problem}"
            ) from error
        # One number for every character, so that numpy can count them: sorting takes
        # thirty times as long.
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        occurs = np.bincount(codes) > 0
        characters = np.flatnonzero(occurs)
        numbers = np.cumsum(occurs, dtype=np.int32) - 1
        tokens = torch.from_numpy(numbers[codes])
        context = config.context
        # With a stride of 1, a window may start at any character.
        windows = split(tokens, context, stride=1, held_out=config.held_out)
        if windows is None:
            problem = f"has {len(tokens):,} characters"
            raise UsageError(
                f"data.file: {path} {problem}, too few for windows of {context:,}"
            )
        self.sizes = {"vocabulary": len(characters)}
        self.classes = [chr(character) for character in characters]
        self.tables = {
            "characters": torch.from_numpy(characters.astype(np.int32))
        }
        return windows

    def render(self, learner: Learner, path: Path) -> None:
        """Writes a text: the start of the held-out part, and its continuation by the model.

        Raises:
            UsageError: the learner cannot write.
        """
        if not isinstance(learner, LanguageModel):
            problem = "has no method 'write': it is not a LanguageModel"
            raise UsageError(f"learner '{type(learner).__name__}' {problem}")
        assert isinstance(self.held_out, Windows)
        prompt = self.held_out.tokens[1 : PROMPT + 1].long()
        draws = torch.rand(1, WRITTEN, device=prompt.device)
        continuation = learner.write(prompt[None], draws, TEMPERATURE)[0]
        tokens = torch.cat([prompt, continuation])
        path.write_text(learner.text(tokens) + "\n", encoding="utf-8")

    def fingerprint(self) -> str:
        """Returns the file's SHA-256."""
        return self._digest


def help_texts() -> Path:
    """Returns the file with Python's help texts, which serve as synthetic data.

    Raises:
        UsageError: This Python has no help texts.
    """
    spec = find_spec("pydoc_data.topics")
    path = Path(spec.origin) if spec and spec.origin else None
    if path is None or not path.is_file():
        problem = "this Python has no help texts (pydoc_data)"
        raise UsageError(
            f"data.synthetic: {problem}; set data.file to a text instead"
        )
    return path
