"""Text in memory, as windows of characters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.api import Batch, DatasetSource, Learner, Rows, UsageError

from .language_model import LanguageModel

if TYPE_CHECKING:
    from .config import TextConfig

PROMPT, WRITTEN, TEMPERATURE = 64, 1_000, 0.8
"""Initial characters, written characters, and temperature."""


class Windows:
    """Overlapping parts of one text, each of ``context`` characters and the one after them."""

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self.tokens, self.context, self.stride = tokens, context, stride
        self.offsets = torch.arange(context + 1, device=tokens.device)
        self.nbytes = tokens.nbytes

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.context) // self.stride + 1)

    def take(self, index: Tensor) -> Batch:
        """The windows with these numbers, [B, context + 1]."""
        return {"tokens": self.tokens[index[:, None] * self.stride + self.offsets].long()}

    def to(self, device: torch.device) -> Windows:
        """Returns the same windows on a device."""
        return Windows(self.tokens.to(device), self.context, self.stride)


class Text(DatasetSource):
    """Windows with random starts for training, and adjacent ones for evaluation."""

    held_out: Rows

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
        cut, context = int(len(tokens) * (1 - config.held_out)), config.context
        if cut <= context or cut == len(tokens):
            raise UsageError(f"data.file: {path} has {len(tokens):,} characters, too few for windows of {context:,}")
        self.sizes = {"vocabulary": len(characters)}
        self.classes = [chr(character) for character in characters]
        self.tables = {"characters": torch.from_numpy(characters.astype(np.int32))}
        return Windows(tokens[:cut], context, stride=1), Windows(tokens[cut - 1 :], context, stride=context)

    def tokens(self, batch: Batch) -> int:
        """Characters that are predicted."""
        rows, columns = batch["tokens"].shape
        return int(rows * (columns - 1))

    def held_out_batches(self) -> Iterator[Batch]:
        """Every held-out character once; the last window may be shorter.

        Of selected windows there is no such rest.
        """
        yield from super().held_out_batches()
        if not isinstance(self.held_out, Windows):
            return
        rest = self.held_out.tokens[len(self.held_out) * self.held_out.stride :]
        if len(rest) > 1:
            yield {"tokens": rest[None].long()}

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
