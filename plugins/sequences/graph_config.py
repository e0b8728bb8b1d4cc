"""The faces of the model of walks through molecules and of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import GradientLearnerConfig, Objective

from ..molecules.table import MoleculesConfig
from ..settings import Count, Heads

if TYPE_CHECKING:
    from .graph_gpt import GraphGpt
    from .graph_walks import GraphWalks


class GraphGptConfig(GradientLearnerConfig):
    """A transformer that reads a graph as the tokens of a walk over all its edges (Zhao et al. 2024, GraphGPT).

    One training has two tasks. First, as a language model, it predicts the next token of a walk and never looks at what
    was measured; then the mean of its last hidden states over a walk predicts that.

    When it helps: structures of which there are more than measurements, or that a walk tells in few tokens.
    When it hurts: large graphs, because attention grows with the square of the walk.
    """

    kind: ClassVar[str] = "graph_gpt"
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
    """Numbers that stand for one token between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the activations that is dropped in training."""
    pretrained: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the training, at its beginning, that predicts the next token; the rest predicts what was measured."""

    def draws(self) -> bool:
        """Dropout does."""
        return self.dropout > 0

    def implementation(self) -> type[GraphGpt]:
        """The learner in torch."""
        from .graph_gpt import GraphGpt

        return GraphGpt


class GraphWalksConfig(MoleculesConfig):
    """A table of molecules, each as the tokens of a walk over all its bonds, with one measured number each.

    A walk begins anywhere and turns at random, so one molecule has many. Those of held-out molecules are always the
    same. A tenth of the molecules is for testing and a tenth for validation, and molecules with the same skeleton are
    on the same side. Without a file of its own it is ESOL (``runner data get esol.csv``); where that is not at hand,
    made-up measurements stand in for it, with a warning.
    """

    kind: ClassVar[str] = "graph_walks"
    provides: ClassVar[str] = "graph_tokens"
    shapes_vary: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("rmse", "nats_per_token")

    redraw: bool = True
    """Whether a molecule has a new walk whenever it is drawn, instead of the same one in the whole training."""

    def draws_samples(self) -> bool:
        """Walks that are drawn anew are others."""
        return self.redraw

    def implementation(self) -> type[GraphWalks]:
        """The source in torch."""
        from .graph_walks import GraphWalks

        return GraphWalks
