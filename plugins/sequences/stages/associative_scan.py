"""The recurrence as a parallel scan."""

from __future__ import annotations

from typing import ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig


class AssociativeScanConfig(StageConfig):
    """Computes the recurrence of a state-space model for all tokens in parallel, in
    log2 of their number steps.

    When it helps: meant for hardware where steps cost more than arithmetic; it was measured on a
    CPU alone.
    When it hurts: it keeps the states of all tokens, and does log2 of their number times the
    arithmetic; on a CPU, and wherever ``chunked_scan`` can be used, that is slower.
    """

    kind: ClassVar[str] = "associative_scan"
    implementation = "AssociativeScan"
    phase: ClassVar[int] = 3
    claims: ClassVar[frozenset[str]] = frozenset({"scan"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class AssociativeScan(Stage):
    """Replaces the recurrence."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the recurrence by a parallel scan."""
        from ..scans import associative

        pipeline.slots.replace("scan", associative)
