"""Features that are averaged over neighbours once."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, ClassVar, cast

from runner.api import (
    Batch,
    Close,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    UsageError,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..citation import CitationGraph
    from ..config import GcnConfig
    from ..gcn import Aggregate


class PropagationCacheConfig(StageConfig):
    """Averages the features over neighbours before the training instead of after the first layer
    of every update.

    A layer computes Â(XW), which is (ÂX)W; ÂX does not change in a training. Dropout of the input
    would change X, so the stage refuses it.

    When it helps: entire graphs without dropout of the input, by little; it saves an average over
    as many numbers as the first layer puts out.
    When it hurts: sparse features become dense, and averaging after a wide first layer
    may be cheaper.
    """

    kind: ClassVar[str] = "propagation_cache"
    implementation = "PropagationCache"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"features", "aggregate"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class PropagationCache(Stage):
    """Averages before the first layer; remembers the average for the graphs of the source."""

    def attach(self, pipeline: Pipeline) -> None:
        """Averages what is trained on and what is held out.

        Raises:
            UsageError: the learner drops features.
        """
        from ..gcn import propagate

        model = cast("GcnConfig", pipeline.learner.config)
        input_dropout = model.input_dropout
        if input_dropout is None:
            input_dropout = model.dropout
        if input_dropout:
            raise UsageError(
                "propagation_cache: dropout changes the features: set model.input_dropout to 0"
            )
        source = cast("CitationGraph", pipeline.source)
        cached: list[tuple[list[Tensor], list[int], Tensor]] = []
        for rows in (source.train, source.held_out):
            tensors = [rows.tensors[name] for name in ("x", "edge", "weight")]
            # Holding the tensors keeps their identity unique; their version changes
            # with every write.
            versions = [tensor._version for tensor in tensors]
            cached.append((tensors, versions, propagate(*tensors)))
        aggregate_every_layer: Aggregate = pipeline.slots.aggregate

        def features(graph: Batch) -> Tensor:
            requested = [graph[name] for name in ("x", "edge", "weight")]
            requested_versions = [tensor._version for tensor in requested]
            for tensors, versions, average in cached:
                is_cached = all(map(is_, requested, tensors))
                if is_cached and requested_versions == versions:
                    return average
            # Another stage may have replaced the graph.
            return propagate(*requested)

        def aggregate(layer: int, x: Tensor, graph: Batch) -> Tensor:
            return x if layer == 0 else aggregate_every_layer(layer, x, graph)

        pipeline.slots.replace("features", features)
        pipeline.slots.replace("aggregate", aggregate)
