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
"""From clouds [B, P, 3], and their numbers [B] if they have any, to centres [B, M] and neighbours
[B, M, N].
"""


class GroupingCacheConfig(StageConfig):
    """Looks for the neighbourhoods of every cloud once, before the training, instead of in every
    update.

    Only clouds that are used again can be cached (``data.clouds``), if their points are not changed
    in between. A cloud is found by its number, and compared; held-out ones have none, and are
    grouped each time.

    When it helps: small models, where the search for far points takes a large part of an update.
    When it hurts: a training on few clouds overfits to them, and generalizes less than one that
    samples new ones.
    """

    kind: ClassVar[str] = "grouping_cache"
    implementation = "GroupingCache"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"group"})

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the groups of a cloud do not depend on the others in its batch."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns None, because it always has an effect where it is allowed.

        Raises:
            UsageError: Clouds are sampled for each batch, or changed before they are used.
        """
        data = cast("CubeGraspsConfig", setting.data)
        if getattr(data, "clouds", None) is None:
            raise UsageError(
                "grouping_cache: every sample has a new cloud: set data.clouds"
            )
        if data.augment.jitter_mm or data.augment.degrees:
            changed = "jitter_mm" if data.augment.jitter_mm else "degrees"
            raise UsageError(
                f"grouping_cache: data.augment.{changed} changes clouds whenever they are "
                f"drawn: set it to 0"
            )
        return None


class GroupingCache(Stage):
    """Groups the clouds that a source keeps."""

    def attach(self, pipeline: Pipeline) -> None:
        """Groups all of them in batches of the recipe's size.

        Raises:
            UsageError: the source keeps no clouds.
        """
        import torch

        stored = getattr(
            getattr(pipeline.source, "train", None), "stored", None
        )
        if stored is None:
            raise UsageError(
                f"grouping_cache: a {type(pipeline.source).__name__} keeps no clouds"
            )
        learner = cast("GraspLearner", pipeline.learner)
        clouds = stored["cloud"].to(learner.device)
        chunks = clouds.split(pipeline.batch_size)
        groups = zip(*(learner.group(chunk) for chunk in chunks), strict=True)
        centres, neighbours = (torch.cat(tensors) for tensors in groups)

        def remembering(group: Group) -> Group:
            def remembered(
                cloud: Tensor, number: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
                # A held-out cloud has no number, and mixed precision rounds the points.
                if number is None or cloud.dtype != clouds.dtype:
                    return group(cloud, number)
                # Another stage may have changed the points of a cloud.
                if not torch.equal(cloud, clouds[number]):
                    return group(cloud, number)
                return centres[number], neighbours[number]

            return remembered

        pipeline.slots.wrap("group", remembering)
