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

    Finding a shortest walk over all bonds means matching atoms, which takes longer than looking the walk up. Which of a
    molecule's ``variants`` comes is drawn; what it is follows from the molecule's number and its own, so a resumed
    training sees the same ones.

    When it helps: from the second epoch on, the more the smaller the model.
    When it hurts: where walks are drawn anew (``data.redraw``), few variants are less to learn from. Walks of all
    molecules stay in memory, some hundred bytes each.
    """

    kind: ClassVar[str] = "walk_cache"
    phase: ClassVar[int] = 1

    variants: Annotated[int, Field(ge=1)] = 1
    """Walks of every molecule that are kept."""

    def contract(self, setting: Setting) -> Exact | Statistical:
        """The same bits where every molecule has one walk anyway; otherwise there are fewer different ones."""
        return Statistical() if getattr(setting.data, "redraw", True) else Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Only walks are kept, and processes that load batches would each keep walks of their own.

        Raises:
            UsageError: every molecule has fewer walks than should be kept.
        """
        if not isinstance(setting.data, GraphWalksConfig):
            return f"'{setting.data.kind}' has no walks"
        if self.variants > 1 and not setting.data.redraw:
            remedy = "set variants: 1, or data.redraw: true"
            raise UsageError(f"without data.redraw a molecule has one walk, and variants is {self.variants}; {remedy}")
        if setting.data.workers:
            return f"each of the {setting.data.workers} workers would keep walks of its own; set data.workers: 0"
        if "prefetch" in setting.stages:
            return "each worker of prefetch would keep walks of its own; switch one of the two off"
        return None

    def implementation(self) -> type[Stage]:
        """What remembers."""
        return WalkCache


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
        """How often a walk had to be made."""
        if self.kept is None:
            return ()
        return (f"walks: {self.kept.made:,} made, {self.kept.found:,} found again",)
