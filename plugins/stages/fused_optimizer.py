"""Uses the fused kernel of optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import Close, Pipeline, Setting, Stage, StageConfig, UsageError


class FusedOptimizerConfig(StageConfig):
    """Makes every optimizer with ``fused=True``: one pass over parameters, gradients and moments.

    When it helps: on a CPU, where the plain loop makes a dozen passes; on a GPU, with many small tensors.
    When it hurts: nowhere known; an optimizer without a fused kernel refuses. Complex parameters and sparse gradients
    have no fused kernel: their optimizer stays as it is, which is noted.
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
        self._unfused: dict[str, str] = {}
        pipeline.slots.wrap("make_optimizer", self._fuse)

    def _fuse(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_optimizer(optimizer: Any, parameters: Any, **settings: Any) -> Any:
            if "fused" not in inspect.signature(optimizer).parameters:
                raise UsageError(f"fused_optimizer: {optimizer.__name__} has no fused kernel; switch the stage off")
            # The groups may be a generator, which can be read only once.
            groups = [*parameters]
            if _are_complex(groups):
                self._unfused[optimizer.__name__] = "complex parameters have"
                return make(optimizer, groups, **settings)
            fused = make(optimizer, groups, **settings, fused=True)
            # Only a gradient shows whether it is sparse.
            fused.register_step_pre_hook(self._leave_sparse)
            return fused

        return make_optimizer

    def _leave_sparse(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Makes groups with a sparse gradient use torch's default kernels."""
        for group in optimizer.param_groups:
            if group["fused"] and any(_has_sparse_gradient(parameter) for parameter in group["params"]):
                group["fused"] = None
                self._unfused[type(optimizer).__name__] = "sparse gradients have"

    def closing_notes(self) -> list[str]:
        """Names the optimizers that have no fused kernel for their parameters or gradients."""
        return [f"{reason} no fused kernel: {name} stays as it is" for name, reason in self._unfused.items()]


def _are_complex(groups: list[Any]) -> bool:
    """Returns whether any parameter is complex, in groups or single."""
    parameters: list[Any] = []
    for group in groups:
        parameters += group["params"] if isinstance(group, dict) else [group]
    return any(parameter.is_complex() for parameter in parameters)


def _has_sparse_gradient(parameter: Any) -> bool:
    """Returns whether the gradient of a parameter holds only some of its rows."""
    return parameter.grad is not None and parameter.grad.is_sparse
