"""Loads batches in worker processes while the model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from runner.api import DatasetConfig, Exact, Pipeline, Setting, Stage, StageConfig, UsageError

if TYPE_CHECKING:
    from runner.api import SourceConfig


class PrefetchConfig(StageConfig):
    """Loads batches ahead in worker processes, as ``data.workers`` does, in a form that can be measured and proven.

    Each worker has up to four batches ready. Every batch has the samples that it would have without the stage, because
    its number seeds what is random in it.

    When it helps: samples that are read from files, decoded or augmented, and a
    processor that is idle meanwhile.
    When it hurts: the workers use memory and processors, and batches travel through shared memory.
    """

    kind: ClassVar[str] = "prefetch"
    implementation = "Prefetch"
    phase: ClassVar[int] = 2

    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that load batches."""

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: samples do not depend on the process that loads them."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why nothing can be loaded ahead, or None."""
        data = setting.data
        if not isinstance(data, DatasetConfig):
            return f"'{data.kind}' is not a dataset: its batches depend on the training"
        if data.depends_on_feedback:
            return "the losses of a batch decide which samples are next: nothing can be loaded ahead"
        if data.in_memory:
            return "the data are in memory as they are used: there is nothing to load"
        return f"data.workers: {data.workers} load ahead already" if data.workers else None


class Prefetch(Stage):
    """Builds the source with workers."""

    def adapt_source(self, data: SourceConfig) -> SourceConfig:
        """Returns the settings with a number of workers."""
        settings: dict[str, Any] = {"workers": self.config.workers}
        return data.model_copy(update=settings)

    def attach(self, pipeline: Pipeline) -> None:
        """Checks the training data.

        Raises:
            UsageError: They are in memory.
        """
        from runner.api import Rows

        data = getattr(pipeline.source, "train", None)
        if isinstance(data, Rows):
            raise UsageError(
                f"prefetch: {type(data).__name__} are in memory, and nothing is loaded; switch the stage off"
            )
