"""Stops a training that has gone wrong, and says where."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from runner.api import Batch, Learner, RunnerError, Slots
from runner.errors import DivergedError

FIRST_UPDATES = 20
"""By then, every trainable parameter must have received a gradient."""


class FiniteGuard:
    """Finds the first number of an update that is not finite.

    It keeps a reference to what every slot of the learner's story returned last; nothing is looked at until a loss
    says that something is wrong.
    """

    def __init__(self, slots: Slots, learner: Learner) -> None:
        self.learner = learner
        self.outputs: dict[str, Any] = {}
        for name in learner.story:
            slots.wrap(name, partial(self._remembered, name))

    def check(self, update: int, losses: Tensor, batch: Batch) -> None:
        """Looks at the scalars that an update returned.

        Raises:
            DivergedError: one of them is NaN or infinite.
        """
        if not bool(losses.isfinite().all()):
            raise DivergedError(f"update {update}: {self._culprit(batch)}; the run was stopped")

    def _remembered(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self.outputs[name] = output
            return output

        return remembered

    def _culprit(self, batch: Batch) -> str:
        for name, tensor in batch.items():
            if _broken(tensor):
                return f"tensor '{name}' of the batch is not finite"
        for slot, output in self.outputs.items():
            for name, tensor in _named(output):
                if _broken(tensor):
                    return f"slot '{slot}' returned a tensor '{name}' that is not finite"
        for name, gradient in self.learner.gradients().items():
            if gradient is not None and _broken(gradient):
                return f"the gradient of '{name}' is not finite"
        for name, parameter in self.learner.named_parameters():
            if _broken(parameter):
                return f"parameter '{name}' is not finite"
        return "a loss returned by slot 'update' is not finite"


class GradientGuard:
    """Sees to it that no part of the model stays untrained in silence."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.missing = {name for name, _ in learner.named_parameters()}
        self.done = False

    def check(self, update: int) -> None:
        """Looks at the gradients of one of the first updates.

        Raises:
            RunnerError: a trainable parameter has received no finite gradient other than zero so far.
        """
        if self.done:
            return
        for name, gradient in self.learner.gradients().items():
            if gradient is not None and not _broken(gradient) and bool(gradient.any()):
                self.missing.discard(name)
        self.done = not self.missing
        if update >= FIRST_UPDATES and self.missing:
            names = sorted(self.missing)
            raise RunnerError(
                f"no gradient has reached {', '.join(names[:5])}{' ...' if len(names) > 5 else ''} "
                f"({len(names)} parameters) in the first {update} updates: a module is detached, or no loss uses it"
            )


def _broken(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _named(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a slot returned, by name."""
    if isinstance(output, Tensor):
        return [("output", output)]
    if hasattr(output, "_asdict"):
        output = output._asdict()
    elif isinstance(output, tuple):
        output = {f"output {i}": tensor for i, tensor in enumerate(output)}
    fields = output if isinstance(output, dict) else {}
    return [(name, tensor) for name, tensor in fields.items() if isinstance(tensor, Tensor)]
