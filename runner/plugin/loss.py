"""The loss of a batch, as returned by a learner with a module and a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.contract import SAMPLE_LOSSES, Mean
from runner.system.errors import RunnerError
from runner.system.tensor_trees import summable


class Loss(NamedTuple):
    """The loss of a batch: the gradient is that of ``sum / count``, however the batch is cut."""

    sum: Tensor
    """Sum over all items, a scalar."""
    count: Any
    """Number of items (samples, tokens): a number or a tensor."""
    also: Mapping[str, Mean] = {}
    """Further values to log, detached."""
    samples: Tensor | None = None
    """Loss of every sample [B], detached, if the source selects samples by it
    (``GradientLearner.sample_losses``).
    """

    def outputs(self) -> dict[str, Any]:
        """Returns the result of an update: what is logged, and the losses of the samples."""
        if self.samples is None:
            return dict(self.means())
        return {**self.means(), SAMPLE_LOSSES: self.samples}

    def means(self) -> dict[str, Mean]:
        """Returns all of it under the names that are logged.

        Raises:
            RunnerError: ``also`` has a name that is reserved.
        """
        if "loss" in self.also:
            problem = "'loss' is the name of the loss itself"
            raise RunnerError(f"Loss.also: {problem}; use another name for this metric")
        return {"loss": Mean(self.sum, self.count), **self.also}

    @staticmethod
    def total(parts: Sequence[Loss]) -> Loss:
        """Returns the loss of a batch that was cut into parts; every part may log different
        values.
        """
        also: dict[str, Mean] = {}
        for loss in parts:
            for name, mean in loss.also.items():
                total, count = map(summable, mean)
                if name in also:
                    total = also[name].sum + total
                    count = also[name].count + count
                also[name] = Mean(total, count)
        # The first loss is not added to a zero, which would be another operation on the device.
        total = summable(parts[0].sum)
        count = summable(parts[0].count)
        for loss in parts[1:]:
            total = total + summable(loss.sum)
            count = count + summable(loss.count)
        samples = None
        if all(loss.samples is not None for loss in parts):
            samples = torch.cat(
                [loss.samples for loss in parts if loss.samples is not None]
            )
        return Loss(total, count, also, samples)


def check_loss(loss: Any, method: str) -> None:
    """Raises a RunnerError if the result of a method is not a loss for training."""
    problem = _problem(loss)
    if problem:
        expected = "Loss(sum, count) with a scalar tensor as its sum"
        raise RunnerError(f"{method} should return {expected}, {problem}")


def _problem(loss: Any) -> str | None:
    if not isinstance(loss, Loss):
        return f"got {type(loss).__name__}"
    total: Any = loss.sum
    if not isinstance(total, Tensor):
        actual = f"its sum is a {type(total).__name__}"
        return f"and {actual}; leave it a tensor, with its gradient"
    if total.dim():
        actual = f"its sum has the shape {list(total.shape)}"
        return f"and {actual}; add it up, as reduction='sum' does"
    if not total.requires_grad:
        return (
            "and no parameter has a part in its sum: something on the way is detached"
        )
    return None
