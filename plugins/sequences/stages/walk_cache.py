"""Walks that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig, Statistical, UsageError

from ..graph_config import GraphWalksConfig

if TYPE_CHECKING:
    from ..graph_walks import KeptWalks


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
        return Statistical() if getattr(setting.data, "redraw", True) else Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason without walks, or with processes that would cache walks separately.

        Raises:
            UsageError: every molecule has fewer walks than should be kept.
        """
        if not isinstance(setting.data, GraphWalksConfig):
            return f"'{setting.data.kind}' has no walks"
        if self.variants > 1 and not setting.data.redraw:
            remedy = "set variants: 1, or data.redraw: true"
            raise UsageError(f"without data.redraw a molecule has one walk, and variants is {self.variants}; {remedy}")
        if setting.data.workers:
            return f"each of the {setting.data.workers} workers would cache walks separately; set data.workers: 0"
        if "prefetch" in setting.stages:
            return "each worker of prefetch would cache walks separately; switch one of the two off"
        return None


class WalkCache(Stage):
    """Puts a memory between a source and its walks."""

    kept: KeptWalks | None = None

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces what the source trains on.

        Raises:
            UsageError: the source is another one.
        """
        from ..graph_walks import GraphWalks, KeptWalks

        if not isinstance(pipeline.source, GraphWalks):
            raise UsageError(f"walk_cache keeps walks of a GraphWalks, not of a {type(pipeline.source).__name__}")
        self.kept = pipeline.source.train = KeptWalks(pipeline.source.train, self.config.variants)

    def closing_notes(self) -> Sequence[str]:
        """Returns the number of computed and reused walks."""
        if self.kept is None:
            return ()
        return (f"walks: {self.kept.made:,} made, {self.kept.found:,} found again",)
