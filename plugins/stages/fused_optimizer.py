"""Uses the fused kernel of optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError


class FusedOptimizerConfig(StageConfig):
    """Makes every optimizer with ``fused=True``: one pass over parameters, gradients and moments.

    When it helps: on a CPU, where the plain loop makes a dozen passes; on a GPU, with many small tensors.
    When it hurts: nowhere known; an optimizer without a fused kernel refuses. Complex parameters have no fused kernel:
    their optimizer stays as it is, which is noted.
    """

    kind: ClassVar[str] = "fused_optimizer"
    implementation = "FusedOptimizer"
    phase: ClassVar[int] = 3
    usual: ClassVar[bool] = True
    wraps: ClassVar[frozenset[str]] = frozenset({"make_optimizer"})

    def contract(self, setting: Setting) -> Close:
        """Returns ``Close``: the same algebra."""
        return Close()


class FusedOptimizer(Stage):
    """Makes optimizers with their fused kernel."""

    def attach(self, pipeline: Pipeline) -> None:
        """Adds ``fused=True`` to what makes the optimizers."""
        self._unfused: list[str] = []
        pipeline.slots.wrap("make_optimizer", self._fuse)

    def _fuse(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_optimizer(optimizer: Any, parameters: Any, **settings: Any) -> Any:
            if "fused" not in inspect.signature(optimizer).parameters:
                raise UsageError(f"fused_optimizer: {optimizer.__name__} has no fused kernel; switch the stage off")
            # The groups may be a generator, which can be read only once.
            groups = [*parameters]
            if _are_complex(groups):
                self._unfused.append(optimizer.__name__)
                return make(optimizer, groups, **settings)
            return make(optimizer, groups, **settings, fused=True)

        return make_optimizer

    def closing_notes(self) -> list[str]:
        """Names the optimizers that have no fused kernel for their parameters."""
        return [f"complex parameters have no fused kernel: {name} stays as it is" for name in self._unfused]


def _are_complex(groups: list[Any]) -> bool:
    """Returns whether any parameter is complex, in groups or single."""
    parameters: list[Any] = []
    for group in groups:
        parameters += group["params"] if isinstance(group, dict) else [group]
    return any(parameter.is_complex() for parameter in parameters)
