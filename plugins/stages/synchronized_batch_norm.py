"""Settings of batch normalisation over the samples of all processes."""

from __future__ import annotations

from typing import ClassVar

from runner.api import Close, Setting, StageConfig


class SynchronizedBatchNormConfig(StageConfig):
    """Normalises with means and variances over the samples of all processes.

    Several processes do not train a model with batch normalisation without it, because each would
    normalise with a part of the batch. Two sums of each layer are added up over all processes in the
    forward pass, and their gradients in the backward pass. Unlike torch's ``SyncBatchNorm``, it
    runs on a CPU, too.

    When it helps: batch normalisation on several processes.
    When it hurts: every layer waits for all processes four times in an update.
    """

    kind: ClassVar[str] = "synchronized_batch_norm"
    implementation = ".synchronized_layers:SynchronizedBatchNorm"
    phase: ClassVar[int] = 2
    works_through: ClassVar[frozenset[str]] = frozenset()

    def contract(self, setting: Setting) -> Close:
        """Returns Close: means and variances are sums in another order."""
        return Close()

    def inactive(self, setting: Setting) -> str | None:
        """Returns why nothing is synchronised, or None."""
        return "one process has the entire batch" if setting.processes == 1 else None
