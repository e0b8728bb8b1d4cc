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

PROMPT, WRITTEN, TEMPERATURE = 64, 1_000, 0.8
"""Initial characters, written characters, and temperature."""


class Text(WindowSource):
    """Windows with random starts for training, and adjacent ones for evaluation."""

    def datasets(self, config: TextConfig) -> tuple[Any, Any]:
        """The text up to its held-out end, and that end with the character before it, from which the first follows.

        Raises:
            UsageError: There is no such file, it is not UTF-8, or it is too short.
        """
        path = help_texts() if config.synthetic else config.require(config.file)
        content = path.read_bytes()
        self._digest = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"data.file: {path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
        characters, numbers = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
        tokens = torch.from_numpy(numbers.astype(np.int32))
        context = config.context
        windows = split(tokens, context, stride=1, held_out=config.held_out)
        if windows is None:
            raise UsageError(f"data.file: {path} has {len(tokens):,} characters, too few for windows of {context:,}")
        self.sizes = {"vocabulary": len(characters)}
        self.classes = [chr(character) for character in characters]
        self.tables = {"characters": torch.from_numpy(characters.astype(np.int32))}
        return windows

    def render(self, learner: Learner, path: Path) -> None:
        """Writes a text: the start of the held-out part, and its continuation by the model.

        Raises:
            UsageError: the learner cannot write.
        """
        if not isinstance(learner, LanguageModel):
            raise UsageError(f"learner '{type(learner).__name__}' has no method 'write': it is not a LanguageModel")
        assert isinstance(self.held_out, Windows)
        prompt = self.held_out.tokens[1 : PROMPT + 1].long()
        draws = torch.rand(1, WRITTEN, device=prompt.device)
        written = torch.cat([prompt, learner.write(prompt[None], draws, TEMPERATURE)[0]])
        path.write_text(learner.text(written) + "\n", encoding="utf-8")

    def fingerprint(self) -> str:
        """The file's SHA-256."""
        return self._digest


def help_texts() -> Path:
    """Returns the file with Python's help texts, which serve as synthetic data.

    Raises:
        UsageError: This Python has no help texts.
    """
    spec = find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UsageError("data.synthetic: this Python has no help texts (pydoc_data); set data.file to a text instead")
    return Path(spec.origin)
