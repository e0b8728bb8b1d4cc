"""Features that are averaged over neighbours once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from runner.api import Batch, Close, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ..citation import CitationGraph
    from ..config import GcnConfig
    from ..gcn import Aggregate


class PropagationCacheConfig(StageConfig):
    """Averages the features over neighbours before the training instead of after the first layer of every update.

    A layer computes Â(XW), which is (ÂX)W; ÂX does not change in a training. Dropout of the input would change X, so
    the stage refuses it.

    When it helps: on paper, always; the average over so many numbers as the first layer puts out is what is saved.
    When it hurts: features with few ones in a row become dense, and a wide first layer would rather be averaged.
    """

    kind: ClassVar[str] = "propagation_cache"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"aggregate"})

    def contract(self, setting: Setting) -> Close:
        """The same algebra."""
        return Close()

    def implementation(self) -> type[Stage]:
        """The averaged features."""
        return PropagationCache


class PropagationCache(Stage):
    """Puts averaged features in the place of the others, in what is trained on and what is held out."""

    def attach(self, pipeline: Pipeline) -> None:
        """Averages them; after the first layer, nothing is left to do for graphs that have them.

        Raises:
            UsageError: the learner drops features.
        """
        from ..gcn import propagate

        model = cast("GcnConfig", pipeline.learner.config)
        if model.dropout if model.input_dropout is None else model.input_dropout:
            raise UsageError("propagation_cache: dropout changes the features: set model.input_dropout to 0")
        source = cast("CitationGraph", pipeline.source)
        for rows in (source.train, source.held_out):
            graph = rows.tensors
            graph["propagated"] = propagate(graph.pop("x"), graph["edge"], graph["weight"])
        whole: Aggregate = pipeline.slots.aggregate

        def aggregate(layer: int, x: Tensor, graph: Batch) -> Tensor:
            return x if layer == 0 and "propagated" in graph else whole(layer, x, graph)

        pipeline.slots.replace("aggregate", aggregate)
