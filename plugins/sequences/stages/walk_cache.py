"""Cache of walks through molecules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from runner.api import (
    Exact,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    Statistical,
    UsageError,
)

from ..graph_config import GraphWalksConfig

if TYPE_CHECKING:
    from ..graph_walks import CachedWalks


class WalkCacheConfig(StageConfig):
    """Keeps walks through molecules instead of making one whenever a molecule is drawn.

    Finding a shortest walk over all bonds means matching atoms, which takes longer than looking the
    walk up. One of a molecule's ``variants`` is selected at random; its content is a function of
    the numbers of molecule and variant, so a resumed training uses the same ones.

    When it helps: from the second epoch on, the more the smaller the model.
    When it hurts: with ``data.redraw``, few variants contain less information than new walks. Walks
    of all molecules stay in memory, some hundred bytes each.
    """

    kind: ClassVar[str] = "walk_cache"
    implementation = "WalkCache"
    phase: ClassVar[int] = 1

    variants: Annotated[int, Field(ge=1)] = 1
    """Walks of every molecule that are kept."""

    def contract(self, setting: Setting) -> Exact | Statistical:
        """Returns ``Exact`` if every molecule has one walk anyway; otherwise ``Statistical``,
        because there are fewer different ones.
        """
        has_many_walks = getattr(setting.data, "redraw", True)
        return Statistical() if has_many_walks else Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason without walks, or with processes that would cache walks separately.

        Raises:
            UsageError: every molecule has fewer walks than should be kept.
        """
        if not isinstance(setting.data, GraphWalksConfig):
            return f"'{setting.data.kind}' has no walks"
        if self.variants > 1 and not setting.data.redraw:
            problem = (
                f"a molecule has one walk, and variants is {self.variants}"
            )
            hint = "set variants: 1, or data.redraw: true"
            raise UsageError(f"without data.redraw {problem}; {hint}")
        reason = "would cache walks separately"
        if setting.data.workers:
            workers = f"each of the {setting.data.workers} workers"
            return f"{workers} {reason}; set data.workers: 0"
        if "prefetch" in setting.stages:
            return (
                f"each worker of prefetch {reason}; switch one of the two off"
            )
        return None


class WalkCache(Stage):
    """Puts a cache between a source and its walks."""

    cache: CachedWalks | None = None

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the training samples of the source.

        Raises:
            UsageError: The source has no walks.
        """
        from ..graph_walks import CachedWalks, GraphWalks

        source = pipeline.source
        if not isinstance(source, GraphWalks):
            name = type(source).__name__
            raise UsageError(
                f"walk_cache keeps walks of a GraphWalks, not of a {name}"
            )
        self.cache = CachedWalks(source.train, self.config.variants)
        source.train = self.cache

    def closing_notes(self) -> Sequence[str]:
        """Returns the number of computed and reused walks."""
        if self.cache is None:
            return ()
        walks = self.cache
        return (f"walks: {walks.misses:,} made, {walks.hits:,} found again",)
