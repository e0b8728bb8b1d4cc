"""Stops a training that has gone wrong, and says where."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.api import Batch, Learner, RunnerError, Slots, State
from runner.engine.diagnosis import Finding, diagnosis, find, is_broken, named_tensors, write_diagnosis
from runner.errors import DivergedError
from runner.recipe.errors import shown_path

FIRST_UPDATES = 20
"""By then, every trainable parameter must have received a gradient."""


class FiniteGuard:
    """Finds the first number of an update that is not finite.

    It keeps a reference to what every slot of the learner's story, and ``update`` itself, returned last; nothing is
    looked at until a loss says that something is wrong.
    """

    def __init__(self, slots: Slots, learner: Learner, folder: Path) -> None:
        """Wraps the slots.

        Args:
            slots: with all stages attached.
            learner: whose story they tell.
            folder: the run's, for the diagnosis.
        """
        self.learner = learner
        self.folder = folder
        self.outputs: dict[str, Any] = {}
        for name in dict.fromkeys((*learner.story, "update")):
            slots.wrap(name, partial(self._remembered, name))

    def check(self, step: int, update: int, losses: Tensor, batch: Batch) -> None:
        """Looks at the scalars that an update returned; if all is well, that is all.

        Args:
            step: environment steps (of a simulator) or updates (of a dataset) so far.
            update: updates so far.
            losses: the scalars of the last update, or their sums over several.
            batch: what the last update learnt from.

        Raises:
            DivergedError: one of them is NaN or infinite; the run's folder then holds ``diagnosis.json``.
        """
        if bool(losses.isfinite().all()):
            return
        told = {slot: output for slot, output in self.outputs.items() if slot != "update"}
        scalars = {name: loss for name, loss in named_tensors(self.outputs.get("update")) if loss.dim() == 0}
        finding = find(batch, told, self.learner) or _lost(scalars)
        content = diagnosis(step, update, finding, scalars, batch, told, self.learner)
        try:
            where = f"statistics are in {shown_path(write_diagnosis(self.folder, content))}"
        except OSError as error:
            where = f"no diagnosis could be written ({error})"
        raise DivergedError(f"step {step}, update {update}: {finding}; the run was stopped; {where}")

    def _remembered(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self.outputs[name] = output
            return output

        return remembered


def _lost(scalars: Mapping[str, Tensor]) -> Finding:
    """The scalar that is to blame when nothing before it is."""
    name = next((name for name, scalar in scalars.items() if is_broken(scalar)), None)
    return Finding("loss", name, "update")


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
            if gradient is not None and not is_broken(gradient) and bool(gradient.any()):
                self.missing.discard(name)
        self.done = not self.missing
        if update >= FIRST_UPDATES and self.missing:
            names = sorted(self.missing)
            raise RunnerError(
                f"no gradient has reached {', '.join(names[:5])}{' ...' if len(names) > 5 else ''} "
                f"({len(names)} parameters) in the first {update} updates: a module is detached, or no loss uses it"
            )

    def state_dict(self) -> State:
        """Which parameters have received no gradient yet."""
        return {"missing": sorted(self.missing), "done": self.done}

    def load_state_dict(self, state: State) -> None:
        """Goes on judging where ``state_dict`` was asked: neither anew nor more leniently."""
        self.missing, self.done = set(state["missing"]), state["done"]
