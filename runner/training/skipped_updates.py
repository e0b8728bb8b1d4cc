"""Skips updates whose loss or gradients are not finite (``train.on_nonfinite: skip``)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from runner.plugin.learner import Learner
from runner.plugin.module_state import BufferSnapshot
from runner.system.errors import DivergedError
from runner.system.tensor_trees import map_tensors, stored_numbers

if TYPE_CHECKING:
    from runner.plugin.loss import Loss
    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch, State
    from runner.training.guards import FiniteGuard
    from runner.training.pipeline import Assembly

_UNCHANGED = frozenset({"modules", "optimizers"})
_log = logging.getLogger(__name__)


class Skipped(dict[str, Any]):
    """The result of an update that was skipped: its losses, which are not averaged."""


class _NotFinite(Exception):  # noqa: N818 (it ends an update, and is no failure)
    """Leaves an update before anything of the learner has changed."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss


class SkippedUpdates:
    """Leaves an update between its backward and its optimizer, if a number is not finite.

    Parameters, optimizers and averages are not touched by then. Buffers are: they are copied before
    every update, and restored, as are further entries of the learner's ``state_dict``, such as a
    hidden state. With loss scaling, gradients that overflow are the scaler's affair,
    which skips the step and lowers the scale; only the loss is looked at.

    Args:
        pipeline: The assembled pipeline of a ``GradientLearner`` with its ``update``.
        guard: Names the origin of the number.

    Attributes:
        count: Number of skipped updates.
    """

    def __init__(self, pipeline: Assembly, guard: FiniteGuard) -> None:
        config = pipeline.recipe.train.on_nonfinite
        self.at_most = config.at_most
        self.count = 0
        self._learner = pipeline.learner
        self._progress = pipeline.progress
        self._guard = guard
        self._has_further_state = (
            type(pipeline.learner).state_dict is not Learner.state_dict
        )
        stages = pipeline.stages.values()
        self._looks_at_gradients = not any(stage.checks_gradients for stage in stages)
        # Outside of all stages: the loss of all micro-batches, and nothing but the update.
        pipeline.slots.wrap("forward_backward", self._wrap_backward)
        pipeline.slots.wrap("update", self._wrap_update)

    def follow(self, progress: Progress, batch: Batch, output: Skipped) -> None:
        """Counts a skipped update, and removes its gradients.

        Raises:
            DivergedError: More updates were skipped than the recipe allows.
        """
        if self.count == self.at_most:
            try:
                self._guard.check(progress, batch, output)
            except DivergedError as error:
                raise DivergedError(
                    f"{error}; {self.at_most} updates were skipped before, as many as "
                    "train.on_nonfinite allows"
                ) from None
        self.count += 1
        origin = self._guard.origin_of(batch, output)
        _log.warning(
            "update %d was skipped (%d of at most %d): %s",
            progress.updates,
            self.count,
            self.at_most,
            origin["message"],
        )
        for role in self._learner.roles.values():
            role.zero_grad()

    def summary(self) -> str:
        """Returns the number of skipped updates for the closing table."""
        return (
            f"{self.count:,} of {self._progress.updates:,} updates, whose loss or gradients were "
            f"not finite (at most {self.at_most:,})"
        )

    def state_dict(self) -> State:
        """Returns the count."""
        return {"count": self.count}

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self.count = int(state["count"])

    def _wrap_backward(self, step: Callable[..., Loss]) -> Callable[..., Loss]:
        def forward_backward(*arguments: Any, **options: Any) -> Loss:
            loss = step(*arguments, **options)
            if not self._is_finite(loss):
                raise _NotFinite(loss)
            return loss

        return forward_backward

    def _wrap_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def update(*arguments: Any) -> Any:
            buffers = BufferSnapshot(self._learner.modules().values())
            further = self._further_state() if self._has_further_state else {}
            try:
                return step(*arguments)
            except _NotFinite as bad:
                buffers.restore()
                if further:
                    self._learner.load_state_dict(
                        {**self._learner.state_dict(), **further}
                    )
                return Skipped(bad.loss.means())

        return update

    def _further_state(self) -> State:
        """Returns copies of what the learner saves in addition to modules and optimizers."""
        state = self._learner.state_dict()
        entries = {
            name: value for name, value in state.items() if name not in _UNCHANGED
        }
        self._has_further_state = bool(entries)
        # A tensor with a graph cannot be copied.
        copies: State = copy.deepcopy(map_tensors(torch.Tensor.detach, entries))
        return copies

    def _is_finite(self, loss: Loss) -> bool:
        """Returns whether the loss and the gradients of an update are finite; waits for a GPU."""
        numbers = [loss.sum.detach()]
        if self._looks_at_gradients:
            gradients = self._learner.gradients().values()
            numbers += [gradient for gradient in gradients if gradient is not None]
        flags = [stored_numbers(number).isfinite().all() for number in numbers]
        # A device is waited for once.
        return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())
