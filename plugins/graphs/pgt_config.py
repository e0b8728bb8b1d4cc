"""The faces of the learner that is pre-trained on contexts of nodes, and of these contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.api import (
    GradientLearnerConfig,
    Objective,
    SourceOutline,
    TensorOutline,
)

from ..settings import Count, Heads
from .config import CitationConfig


class PgtConfig(GradientLearnerConfig):
    """A graph transformer that is pre-trained without labels on the contexts of nodes (PGT,
    arXiv:2407.03953).

    A context is a node and the nodes that a walk from it, which returns to it at random, visits
    most. Some nodes are excluded from the encoder; a small decoder learns to restore them, and the
    encoder to distinguish the context of a node's neighbour from those of other nodes (InfoNCE).
    The result is the encoder: the prediction is a node's embedding.

    When it helps: many nodes and few labels; graphs too large for one batch, because a context is
    all that is needed. When it hurts: small graphs with labels on all nodes, which a graph
    convolution learns in seconds.
    """

    kind: ClassVar[str] = "pgt"
    implementation = ".pgt:Pgt"
    learns_from: ClassVar[str] = "node_contexts"
    # Every node of a batch is compared with all others.
    couples_samples: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {
            "kind": "adamw",
            "lr": 5e-4,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        }
    }

    layers: Count = 3
    """Blocks of the encoder."""
    decoder_layers: Count = 1
    """Blocks of the decoder, which only pre-training needs."""
    width: Count = 128
    """Size of the vector of a node between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    attention: Literal["softmax", "linear"] = "softmax"
    """How nodes look at one another; ``linear`` (elu + 1) takes time that grows with their
    number, not its square.
    """
    masked: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a context's nodes whose features are hidden."""
    contrast: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the part of the loss that distinguishes neighbours from others."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """By which the similarities of that part are divided."""


class NodeContextsConfig(CitationConfig):
    """Nodes of a citation graph, each with those that a walk from it visits most (personalised
    PageRank).

    Training uses all nodes, and no label; the evaluation trains a linear classifier of the
    embeddings on the few labels and tests it. The default file is Cora (``runner data get
    cora.npz``). With ``synthetic: true`` it is the graph of scikit-learn's 1,797 digits, each
    connected with its ten nearest.
    """

    kind: ClassVar[str] = "node_contexts"
    implementation = ".contexts:NodeContexts"
    provides: ClassVar[str] = "node_contexts"
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    objective: ClassVar[Objective] = Objective(
        "accuracy", "maximize", margin=0.02, unit="share"
    )

    context: Annotated[int, Field(ge=2)] = 32
    """Nodes of a context, with the one that it is of; where fewer can be reached, the rest is
    padding.
    """
    components: Count = 64
    """Number of components of the features after a singular value decomposition; with more of them,
    the accuracy of the probe depends less on the training.
    """
    restart: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Probability with which the walk returns to its node at every step."""
    steps: Count = 20
    """Steps of the walk, after which its distribution is taken as it is."""
    neighbour: Literal["walk", "best"] = "walk"
    """The neighbour of a node: sampled for each batch from the distribution of the walk, or always
    the most visited.
    """

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of contexts of nodes and of their neighbours."""
        size = self.size()
        if size is None:
            return None
        width = min(size.nodes, size.features, self.components)

        def context() -> dict[str, TensorOutline]:
            shape = (batch_size, self.context)
            return {
                "x": TensorOutline((*shape, width)),
                "mask": TensorOutline(shape, "bool"),
                "weight": TensorOutline(shape),
            }

        node = TensorOutline((batch_size,), "int64")
        batch = {**context(), "neighbour": context(), "node": node}
        return SourceOutline(batch, epoch_samples=size.nodes)
