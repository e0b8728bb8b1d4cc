"""Clouds that are encoded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig

if TYPE_CHECKING:
    from torch import Tensor

Condition = Callable[[Any], Callable[[], "Tensor"]]


class ConditionCacheConfig(StageConfig):
    """Encodes a cloud once while grasps are sampled for it, instead of at every level of noise.

    What is remembered is forgotten with the sampling, so that it is never older than the weights.

    When it helps: evaluation and answers, the more the fewer grasps are sampled for a cloud.
    When it hurts: never; a training's updates have nothing of it.
    """

    kind: ClassVar[str] = "condition_cache"
    implementation = "ConditionCache"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"condition"})

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same numbers."""
        return Exact()


class ConditionCache(Stage):
    """Caches the condition of a sampling."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the slot with a function that computes the tokens at the first call."""

        def remembering(condition: Condition) -> Condition:
            return lambda cloud: cache(condition(cloud))

        pipeline.slots.wrap("condition", remembering)
