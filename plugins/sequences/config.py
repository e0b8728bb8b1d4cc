"""The faces of the language model and its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from runner.api import DataFile, DataName, FileDatasetConfig, GradientLearnerConfig, Objective, Unit

if TYPE_CHECKING:
    from .gpt import Gpt
    from .text import Text

Count = Annotated[int, Field(ge=1)]

TINY_SHAKESPEARE = DataFile(
    name="tinyshakespeare.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    size=1_115_394,
    about="40,000 lines of Shakespeare's plays, put together by Andrej Karpathy (char-rnn, MIT); public domain",
)


class GptConfig(GradientLearnerConfig):
    """A transformer that predicts the next symbol from those before it (Radford et al. 2019, GPT-2).

    Normalisation stands before attention and before the feed-forward layer, positions are learnt, and the embedding is
    also the last layer.

    When it helps: text by the character, windows of up to some hundred symbols.
    When it hurts: long windows, because attention grows with their square; and small data, which it learns by heart.
    """

    kind: ClassVar[str] = "gpt"
    learns_from: ClassVar[str] = "tokens"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "max_grad_norm": 1.0}
    }
    headline: ClassVar[tuple[str, ...]] = ("nats_per_character",)
    objective: ClassVar[Objective] = Objective("nats_per_character", "minimize", margin=0.02, unit="nats")

    layers: Count = 4
    """Blocks of attention and a feed-forward layer."""
    width: Count = 128
    """Numbers that stand for one symbol between the blocks."""
    heads: Count = 4
    """Attention heads of every block; they share the width among them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the activations that is dropped in training."""

    @field_validator("heads")
    @classmethod
    def _divides_the_width(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width", heads)
        if width % heads:
            raise ValueError(f"should divide the width of {width}")
        return heads

    def draws(self) -> bool:
        """Dropout does."""
        return self.dropout > 0

    def implementation(self) -> type[Gpt]:
        """The learner in torch."""
        from .gpt import Gpt

        return Gpt


class TextConfig(FileDatasetConfig):
    """Any text in UTF-8, by the character; its end is held out.

    Training draws windows that begin anywhere; evaluation predicts every held-out character once, in windows side by
    side. Without a file of its own it is tiny Shakespeare (``runner data get tinyshakespeare.txt``); where that is not
    at hand, Python's own help texts stand in for it, with a warning: for trying things out, not for comparing figures.
    """

    kind: ClassVar[str] = "text"
    provides: ClassVar[str] = "tokens"
    units: ClassVar[frozenset[Unit]] = frozenset({"updates", "samples", "tokens"})
    in_memory: ClassVar[bool] = True
    files: ClassVar[tuple[DataFile, ...]] = (TINY_SHAKESPEARE,)

    file: DataName = TINY_SHAKESPEARE.name
    """A path, relative to the recipe; or the name of a file in the folders of data."""
    context: Annotated[int, Field(ge=1)] = 128
    """Characters of a window that the next ones are predicted from."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the text, at its end, that only evaluation sees."""

    def wanted(self) -> tuple[DataFile, ...]:
        """Tiny Shakespeare, unless another file is named."""
        return tuple(file for file in self.files if file.name == self.file)

    def implementation(self) -> type[Text]:
        """The source in torch."""
        from .text import Text

        return Text
