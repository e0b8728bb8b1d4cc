"""The optimizer's own fused kernel."""

from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import Close, Pipeline, Stage


class FusedOptimizer(Stage):
    """Makes every optimizer with ``fused=True``: one pass over parameters, gradients and moments.

    When it helps: on a CPU, where the plain loop makes a dozen passes; on a GPU, with many small tensors.
    When it hurts: nowhere known; an optimizer without a fused kernel refuses.
    """

    kind: ClassVar[str] = "fused_optimizer"
    phase: ClassVar[int] = 3
    contract = Close()
    wraps: ClassVar[frozenset[str]] = frozenset({"make_optimizer"})

    def attach(self, pipeline: Pipeline) -> None:
        """Adds ``fused=True`` to what makes the optimizers."""
        pipeline.slots.wrap("make_optimizer", self._fuse)

    @staticmethod
    def _fuse(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_optimizer(parameters: Any, **settings: Any) -> Any:
            return make(parameters, **settings, fused=True)

        return make_optimizer
