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
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"condition"})

    def contract(self, setting: Setting) -> Exact:
        """The same numbers."""
        return Exact()

    def implementation(self) -> type[Stage]:
        """What remembers."""
        return ConditionCache


class ConditionCache(Stage):
    """Wraps what says how clouds condition a sampling."""

    def attach(self, pipeline: Pipeline) -> None:
        """By a function that computes the tokens when they are first asked for."""

        def remembering(condition: Condition) -> Condition:
            return lambda cloud: cache(condition(cloud))

        pipeline.slots.wrap("condition", remembering)
