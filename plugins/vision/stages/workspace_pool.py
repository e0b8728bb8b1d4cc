"""Memory of convolutions that is used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig


class WorkspacePoolConfig(StageConfig):
    """Gives the intermediate results of all convolutions one buffer for each thread, device and
    stream.

    The buffer grows to the largest need of a single convolution and is never returned, so that
    its size is the largest need and not the sum. A convolution is finished with it before the
    next one starts; the backward pass reads saved inputs, never the buffer. Torch's convolution
    needs no memory of this kind: only backends such as ``im2col`` and ``winograd`` do.

    When it helps: allocations of many megabytes, which the C library returns to the kernel after
    every convolution and which then cost page faults. When it hurts: memory stays allocated
    between updates; ``heap_retention`` may have the same effect.
    """

    kind: ClassVar[str] = "workspace_pool"
    implementation = "WorkspacePool"
    phase: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"conv_workspace"})

    def contract(self, setting: Setting) -> Exact:
        """Returns that the numbers are the same: only where they are in memory differs."""
        return Exact()


class WorkspacePool(Stage):
    """Replaces what allocates memory for convolutions."""

    def attach(self, pipeline: Pipeline) -> None:
        """Replaces the slot."""
        from ..convolution.workspace import GrowingWorkspace

        self.pool = GrowingWorkspace()
        pipeline.slots.replace("conv_workspace", self.pool)

    def closing_notes(self) -> Sequence[str]:
        """Reports the size of the largest buffer."""
        if not self.pool.calls:
            return ()
        mebibytes = self.pool.largest_bytes / 2**20
        return (f"a buffer of {mebibytes:.1f} MiB used {self.pool.calls:,} times",)
