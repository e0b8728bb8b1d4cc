"""The optimizer's own fused kernel."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError


class FusedOptimizerConfig(StageConfig):
    """Makes every optimizer with ``fused=True``: one pass over parameters, gradients and moments.

    When it helps: on a CPU, where the plain loop makes a dozen passes; on a GPU, with many small tensors.
    When it hurts: nowhere known; an optimizer without a fused kernel refuses.
    """

    kind: ClassVar[str] = "fused_optimizer"
    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"make_optimizer"})

    def contract(self, setting: Setting) -> Close:
        """The same algebra."""
        return Close()

    def implementation(self) -> type[Stage]:
        """What makes the optimizers."""
        return FusedOptimizer


class FusedOptimizer(Stage):
    """Makes optimizers with their fused kernel."""

    def attach(self, pipeline: Pipeline) -> None:
        """Adds ``fused=True`` to what makes the optimizers."""
        pipeline.slots.wrap("make_optimizer", self._fuse)

    @staticmethod
    def _fuse(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_optimizer(optimizer: Any, parameters: Any, **settings: Any) -> Any:
            if "fused" not in inspect.signature(optimizer).parameters:
                raise UsageError(f"fused_optimizer: {optimizer.__name__} has no fused kernel; switch the stage off")
            return make(optimizer, parameters, **settings, fused=True)

        return make_optimizer
