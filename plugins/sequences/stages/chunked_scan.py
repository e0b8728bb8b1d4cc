"""The recurrence in chunks."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import Close, Pipeline, Setting, Stage, StageConfig


class ChunkedScanConfig(StageConfig):
    """Computes the recurrence of a state-space model chunk by chunk, each as products of matrices.

    Inside of a chunk every token is compared with those before it, as in attention; one state is
    passed from chunk to chunk (Dao and Gu 2024: state-space duality).

    When it helps: windows of more than a few tokens, on any hardware: the recurrence has a step for
    every token.
    When it hurts: very large chunks, whose cost grows with the square of their length.
    """

    kind: ClassVar[str] = "chunked_scan"
    implementation = "ChunkedScan"
    phase: ClassVar[int] = 3
    claims: ClassVar[frozenset[str]] = frozenset({"scan"})

    chunk: Annotated[int, Field(ge=1)] = 64
    """Tokens that are computed in parallel."""

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class ChunkedScan(Stage):
    """Replaces the recurrence."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the recurrence by a scan in chunks."""
        from ..scans import chunked

        pipeline.slots.replace(
            "scan", partial(chunked, chunk=self.config.chunk)
        )
