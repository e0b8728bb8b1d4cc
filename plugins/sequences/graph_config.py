"""Configs of the model of walks through molecules and of its data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import (
    GradientLearnerConfig,
    Objective,
    SourceOutline,
    TensorOutline,
)

from ..molecules.table import MoleculesConfig
from ..settings import Count, Heads
from .config import LanguageModelConfig

if TYPE_CHECKING:
    from ..molecules.smiles import Molecule


PADDED = 16
"""A batch's length is a multiple of this."""
BUCKET = 32
"""The length of a bucket is a multiple of this."""
LONGEST = 256
"""Largest number of tokens in a walk."""
VOCABULARY = 121
"""Number of different tokens."""


class GraphGptConfig(GradientLearnerConfig):
    """A transformer that reads a graph as the tokens of a walk over all its edges (Zhao et al.
    2024, GraphGPT).

    One training has two tasks. First, as a language model, it predicts the next token of a walk
    and does not use the targets; then it predicts a target from the mean of its last hidden states
    over a walk.

    When it helps: more structures than measurements, or structures whose walks have few tokens.
    When it hurts: large graphs, because attention grows with the square of the walk.
    """

    sample_losses: ClassVar[bool] = True
    kind: ClassVar[str] = "graph_gpt"
    implementation = ".graph_gpt:GraphGpt"
    learns_from: ClassVar[str] = "graph_tokens"
    depends_on_progress: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = LanguageModelConfig.roles
    headline: ClassVar[tuple[str, ...]] = ("rmse", "nats_per_token")
    objective: ClassVar[Objective] = Objective(
        "rmse", "minimize", margin=0.05, unit="of the table"
    )

    layers: Count = 4
    """Blocks of attention and a feed-forward layer."""
    width: Count = 128
    """Size of the vector of a token between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the activations that is dropped in training."""
    pretrained: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the training, at its start, that predicts the next token; the rest predicts the
    target.
    """

    def phases(self) -> tuple[float, ...]:
        """Returns the shares of the training at which its tasks start."""
        if not self.pretrained:
            return (0.0,)
        return (0.0, self.pretrained)

    def draws(self) -> bool:
        """Returns whether dropout is used."""
        return self.dropout > 0


class GraphWalksConfig(MoleculesConfig):
    """A table of molecules, each as the tokens of a walk over all its bonds, with one measured
    number each.

    A walk has a random start and random turns, so one molecule has many. A held-out molecule is
    predicted from several walks, which never change. A tenth of the molecules is for testing and a
    tenth for validation, and molecules with the same skeleton are in the same part. The default
    file is ESOL (``runner data get esol.csv``). With ``synthetic: true`` molecules and measurements
    are generated.
    """

    kind: ClassVar[str] = "graph_walks"
    implementation = ".graph_walks:GraphWalks"
    provides: ClassVar[str] = "graph_tokens"
    shapes_vary: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("rmse", "nats_per_token")

    walks: Count = 16
    """Walks of every held-out molecule, over whose predictions evaluation takes the mean; one walk
    costs least, and its prediction varies with the walk.
    """
    redraw: bool = True
    """Whether a molecule has a new walk at each access, instead of the same one in the
    entire training.
    """

    def draws_samples(self) -> bool:
        """Returns whether every access has a new walk."""
        return self.redraw

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of a batch with the longest walks of the table."""

        def length_of_walk(molecule: Molecule) -> int:
            from .walks import encode

            # All walks of a molecule have the same length.
            return len(encode(molecule, random.Random(0)))

        lengths = self.largest_sizes(
            batch_size, lambda counts: counts.tokens, length_of_walk
        )
        if lengths is None:
            return None
        longest = round_up(lengths[-1], PADDED)
        rows = Counter(
            min(round_up(length, BUCKET), longest) for length in lengths
        )
        buckets = [
            batch_of_walks(count, length) for length, count in rows.items()
        ]
        largest = f"the {batch_size} longest walks of {self.file}"
        return SourceOutline(
            batch_of_walks(batch_size, longest),
            f"{largest}, padded to {longest} tokens",
            buckets=tuple(buckets),
            sizes={"vocabulary": VOCABULARY, "longest": LONGEST},
        )


def batch_of_walks(rows: int, length: int) -> Mapping[str, TensorOutline]:
    """Returns the shapes of a batch of walks that are padded to one length."""
    return {
        "tokens": TensorOutline((rows, length), "int64"),
        "length": TensorOutline((rows,), "int64"),
        "target": TensorOutline((rows,)),
    }


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple
