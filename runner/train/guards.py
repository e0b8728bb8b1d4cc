"""Stops a training that has gone wrong, and says where."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.plugin.learner import Mean
from runner.system.errors import DivergedError, RunnerError
from runner.system.files import write_durably
from runner.system.names import shown_path
from runner.train.diagnosis import diagnosis, find, is_broken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from runner.plugin.context import Slots
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch, State

FIRST_UPDATES = 20
"""By then, every trainable parameter that is stepped in each update must have received a gradient."""


class FiniteGuard:
    """Finds the first number of an update that is not finite.

    It keeps a reference to what every slot of the learner's story returned last; nothing is looked at until a loss says
    that something is wrong.
    """

    def __init__(self, slots: Slots, learner: Learner, folder: Path) -> None:
        """Wraps the slots, to which all stages are attached; a diagnosis is written into ``folder``, the run's."""
        self.learner, self.folder = learner, folder
        self.outputs: dict[str, Any] = {}
        for name in dict.fromkeys(learner.story):
            slots.wrap(name, partial(self._remembered, name))

    def check(self, progress: Progress, batch: Batch, output: Mapping[str, Any]) -> None:
        """Says where a number came from that is not finite, in the last update: its batch and what it returned.

        Raises:
            DivergedError: always; the run's folder then holds ``diagnosis.json``.
        """
        losses = {name: value.sum if isinstance(value, Mean) else value for name, value in output.items()}
        numbers = {name: torch.as_tensor(loss) for name, loss in losses.items() if isinstance(loss, float | Tensor)}
        scalars = {name: loss for name, loss in numbers.items() if loss.dim() == 0}
        finding = find(batch, self.outputs, self.learner, scalars)
        content = diagnosis(progress, finding, scalars, batch, self.outputs, self.learner)
        path = self.folder / "diagnosis.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
            where = f"statistics are in {shown_path(path)}"
        except OSError as error:
            where = f"no diagnosis could be written ({error})"
        raise DivergedError(
            f"{progress.unit} {progress.done}, update {progress.updates}: {finding}; the run was stopped; {where}"
        )

    def _remembered(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            output = self.outputs[name] = step(*args, **kwargs)
            return output

        return remembered


class GradientGuard:
    """Sees to it that no part of the model stays untrained in silence."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.missing = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
        self.periods = learner.periods()
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
        names = sorted(name for name in self.missing if update >= FIRST_UPDATES * self.periods.get(name, 1))
        if names:
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
