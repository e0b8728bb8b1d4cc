"""Neighbourhoods of clouds that are looked for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import CubeGraspsConfig
    from ..learner import GraspLearner

Group = Callable[..., "tuple[Tensor, Tensor]"]
"""From clouds [B, P, 3], and their numbers [B] if they have any, to centres [B, M] and neighbours [B, M, N]."""


class GroupingCacheConfig(StageConfig):
    """Looks for the neighbourhoods of every cloud once, before the training, instead of in every update.

    Only clouds that come again can be known (``data.clouds``), if nobody moves their points in between. One is found
    again by its number, and compared; held-out ones have none, and are grouped whenever they are seen.

    When it helps: small models, where the search for far points takes a good part of an update.
    When it hurts: a training on few clouds knows these, and generalizes less than one that draws them anew.
    """

    kind: ClassVar[str] = "grouping_cache"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"group"})

    def contract(self, setting: Setting) -> Exact:
        """The same numbers of points: those of a cloud do not depend on the others in its batch."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Nothing is in its way where it may run at all.

        Raises:
            UsageError: clouds are drawn anew, or changed before they are seen.
        """
        data = cast("CubeGraspsConfig", setting.data)
        if getattr(data, "clouds", None) is None:
            raise UsageError("grouping_cache: clouds are drawn anew for every sample: set data.clouds")
        if data.augment.jitter_mm or data.augment.degrees:
            changed = "jitter_mm" if data.augment.jitter_mm else "degrees"
            raise UsageError(
                f"grouping_cache: data.augment.{changed} changes clouds whenever they are drawn: set it to 0"
            )
        return None

    def implementation(self) -> type[Stage]:
        """What remembers."""
        return GroupingCache


class GroupingCache(Stage):
    """Groups the clouds that a source keeps."""

    def attach(self, pipeline: Pipeline) -> None:
        """Groups all of them in batches of the recipe's size.

        Raises:
            UsageError: the source keeps no clouds.
        """
        import torch

        kept = getattr(getattr(pipeline.source, "train", None), "kept", None)
        if kept is None:
            raise UsageError(f"grouping_cache: a {type(pipeline.source).__name__} keeps no clouds")
        learner = cast("GraspLearner", pipeline.learner)
        clouds = kept["cloud"].to(learner.device)
        parts = [learner.group(part) for part in clouds.split(pipeline.batch_size)]
        centres, neighbours = (torch.cat(each) for each in zip(*parts, strict=True))

        def remembering(group: Group) -> Group:
            def remembered(cloud: Tensor, number: Tensor | None = None) -> tuple[Tensor, Tensor]:
                if number is None or cloud.dtype != clouds.dtype or not torch.equal(cloud, clouds[number]):
                    return group(cloud, number)  # a cloud that was changed on the way is another one
                return centres[number], neighbours[number]

            return remembered

        pipeline.slots.wrap("group", remembering)
