"""The loss of a batch, as returned by a learner with a module and a loss."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from runner.plugin.contract import Mean
from runner.system.errors import RunnerError


class Loss(NamedTuple):
    """The loss of a batch: the gradient is that of ``sum / count``, however the batch is cut."""

    sum: Tensor
    """Of all items, a scalar."""
    count: Any
    """How many they are (samples, tokens): a number or a tensor."""
    also: Mapping[str, Mean] = {}
    """Further values to log, detached."""

    def means(self) -> dict[str, Mean]:
        """Returns all of it under the names that are logged.

        Raises:
            RunnerError: ``also`` has a name that is reserved.
        """
        if "loss" in self.also:
            raise RunnerError("Loss.also: 'loss' is the name of the loss itself; use another name for this metric")
        return {"loss": Mean(self.sum, self.count), **self.also}

    @staticmethod
    def total(parts: Sequence[Loss]) -> Loss:
        """Returns the loss of a batch that was cut into parts; every part may log different
        values.
        """
        also: dict[str, Mean] = {}
        for part in parts:
            for name, mean in part.also.items():
                also[name] = Mean(*map(operator.add, also[name], mean)) if name in also else mean
        first, *others = parts
        total, count = first.sum, first.count
        for part in others:
            total, count = total + part.sum, count + part.count
        return Loss(total, count, also)


def check_loss(loss: Any, who: str) -> None:
    """Raises a RunnerError if the result of the method ``who`` is not a loss for training."""
    total: Any = loss.sum if isinstance(loss, Loss) else None
    if not isinstance(loss, Loss):
        wrong = f"got {type(loss).__name__}"
    elif not isinstance(total, Tensor):
        wrong = f"and its sum is a {type(total).__name__}; leave it a tensor, with its gradient"
    elif total.dim():
        wrong = f"and its sum has the shape {list(total.shape)}; add it up, as reduction='sum' does"
    elif not total.requires_grad:
        wrong = "and no parameter has a part in its sum: something on the way is detached"
    else:
        return
    raise RunnerError(f"{who} should return Loss(sum, count) with a scalar tensor as its sum, {wrong}")
