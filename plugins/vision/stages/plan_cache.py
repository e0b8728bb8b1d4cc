"""Plans for convolutions that other processes find again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import platformdirs

from runner.api import Anchor, Exact, Pipeline, Setting, Stage, StageConfig


class PlanCacheConfig(StageConfig):
    """Keeps the plans of ``algorithm_search`` in a file, so that another run does not search.

    The key of a plan contains all that its times depend on: sizes, stride, padding, dilation,
    groups, types, memory format, directions, threads, arithmetic and versions. The file keeps 1,024
    plans, the most recent ones, and has a checksum. Its name contains a digest of processor,
    threads, device and versions: copy it to the same folder of an identical machine, or share the
    folder, and that machine does not search either. A file of another machine, or a damaged one, is
    ignored with a warning.

    When it helps: many short runs of the same model on the same machine.
    When it hurts: a machine whose speed changes with its load keeps what was fastest at that time.
    """

    kind: ClassVar[str] = "plan_cache"
    implementation = "PlanCache"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"conv_plans"})

    folder: Annotated[str | None, Anchor()] = None
    """Where the file is; ``convolutions`` in the user's cache, unless set."""

    def contract(self, setting: Setting) -> Exact:
        """Returns that no number changes: a plan is looked up instead of searched."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason if no stage searches for plans, because torch caches its plans."""
        search = setting.stages.get("algorithm_search")
        if search is None:
            return "no stage searches for plans, and torch caches its plans"
        if getattr(search, "search_every_call", False):
            return "algorithm_search.search_every_call searches again at each call"
        return None


class PlanCache(Stage):
    """Replaces what keeps plans."""

    def attach(self, pipeline: Pipeline) -> None:
        """Reads the file and replaces the slot.

        Raises:
            UsageError: The folder cannot be written.
        """
        from ..convolution.plan_file import FilePlans, Plans, RecentPlans

        choices = pipeline.choices
        self.plans: Plans = RecentPlans()
        self.path: Path | None = None
        if not choices.is_fresh:
            folder = self.config.folder
            cache = platformdirs.user_cache_dir("runner", appauthor=False)
            plans = FilePlans(
                Path(cache, "convolutions") if folder is None else Path(folder),
                choices.machine,
            )
            self.plans = plans
            self.path = plans.path
        pipeline.slots.replace("conv_plans", lambda: self.plans)

    def closing_notes(self) -> Sequence[str]:
        """Reports where the plans are."""
        return () if self.path is None else (f"plans are in {self.path}",)
