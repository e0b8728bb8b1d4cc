"""The faces of the model of walks through molecules and of its data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import GradientLearnerConfig, Objective, SourceOutline, TensorOutline

from ..molecules.table import MoleculesConfig
from ..settings import Count, Heads

if TYPE_CHECKING:
    from ..molecules.smiles import Molecule


PADDED = 16
"""A batch's length is a multiple of this."""
BUCKET = 32
"""The length of a bucket is a multiple of this."""
LONGEST, VOCABULARY = 256, 121
"""Tokens of a walk at most, and different ones."""


class GraphGptConfig(GradientLearnerConfig):
    """A transformer that reads a graph as the tokens of a walk over all its edges (Zhao et al. 2024, GraphGPT).

    One training has two tasks. First, as a language model, it predicts the next token of a walk and never looks at what
    was measured; then the mean of its last hidden states over a walk predicts that.

    When it helps: more structures than measurements, or structures whose walks have few tokens.
    When it hurts: large graphs, because attention grows with the square of the walk.
    """

    kind: ClassVar[str] = "graph_gpt"
    implementation = ".graph_gpt:GraphGpt"
    learns_from: ClassVar[str] = "graph_tokens"
    depends_on_progress: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "max_grad_norm": 1.0}
    }
    headline: ClassVar[tuple[str, ...]] = ("rmse", "nats_per_token")
    objective: ClassVar[Objective] = Objective("rmse", "minimize", margin=0.05, unit="of the table")

    layers: Count = 4
    """Blocks of attention and a feed-forward layer."""
    width: Count = 128
    """Size of the vector of a token between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the activations that is dropped in training."""
    pretrained: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the training, at its beginning, that predicts the next token; the rest predicts what was measured."""

    def phases(self) -> tuple[float, ...]:
        """Returns where walks are learned, and where targets are."""
        return (0.0, self.pretrained) if self.pretrained else (0.0,)

    def draws(self) -> bool:
        """Dropout does."""
        return self.dropout > 0


class GraphWalksConfig(MoleculesConfig):
    """A table of molecules, each as the tokens of a walk over all its bonds, with one measured number each.

    A walk has a random start and random turns, so one molecule has many. The walks of held-out
    molecules never change. A tenth of the molecules is for testing and a tenth for validation, and
    molecules with the same skeleton are in the same part. The default file is ESOL (``runner data
    get esol.csv``). With ``synthetic: true`` molecules and measurements are generated.
    """

    kind: ClassVar[str] = "graph_walks"
    implementation = ".graph_walks:GraphWalks"
    provides: ClassVar[str] = "graph_tokens"
    shapes_vary: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("rmse", "nats_per_token")

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

            return len(encode(molecule, random.Random(0)))

        lengths = self.largest_sizes(batch_size, lambda counts: counts.tokens, length_of_walk)
        if lengths is None:
            return None
        longest = _round_up(lengths[-1], PADDED)
        rows = Counter(min(_round_up(length, BUCKET), longest) for length in lengths)
        return SourceOutline(
            batch_of_walks(batch_size, longest),
            f"the {batch_size} longest walks of {self.file}, padded to {longest} tokens",
            buckets=tuple(batch_of_walks(count, length) for length, count in rows.items()),
            sizes={"vocabulary": VOCABULARY, "longest": LONGEST},
        )


def batch_of_walks(rows: int, length: int) -> Mapping[str, TensorOutline]:
    """Returns the shapes of a batch of walks that are padded to one length."""
    return {
        "tokens": TensorOutline((rows, length), "int64"),
        "length": TensorOutline((rows,), "int64"),
        "target": TensorOutline((rows,)),
    }


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
