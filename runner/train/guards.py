"""Stops a training that has gone wrong, and says where: to a person, and as JSON to a program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.plugin.learner import Mean
from runner.system.errors import DivergedError, RunnerError
from runner.system.files import write_durably
from runner.system.names import shown_path
from runner.system.tree import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from runner.plugin.context import Slots
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch, State

FIRST_UPDATES = 20
"""By then, every trainable parameter that is stepped in each update must have received a gradient."""
_MESSAGES = {
    "batch": "tensor '{tensor}' of the batch is not finite",
    "slot": "slot '{slot}' returned a tensor '{tensor}' that is not finite",
    "gradient": "the gradient of '{tensor}' is not finite",
    "parameter": "parameter '{tensor}' is not finite",
    "loss": "slot '{slot}' returned a tensor '{tensor}' that is not finite",
}
_NOWHERE = "a loss was not finite in an earlier update, and nothing in the last one shows from where"


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
            DivergedError: always; the run's folder then holds ``diagnosis.json``, in which numbers that are not finite
                are the strings NaN, Infinity and -Infinity.
        """
        returned = {name: value.sum if isinstance(value, Mean) else value for name, value in output.items()}
        numbers = {name: torch.as_tensor(each) for name, each in returned.items() if isinstance(each, float | Tensor)}
        losses = {name: loss for name, loss in numbers.items() if loss.dim() == 0}
        gradients = self.learner.gradients()
        broken = (place for place, tensor in self._in_order(batch, gradients, losses) if not tensor.isfinite().all())
        kind, name, slot = next(broken, ("loss", None, "update"))
        said = _MESSAGES[kind].format(tensor=name, slot=slot) if name is not None else _NOWHERE
        parameters = {}
        for parameter_name, parameter in self.learner.named_parameters():
            gradient = gradients.get(parameter_name)
            described = {"gradient_norm": None} if gradient is None else _size("gradient", gradient)
            parameters[parameter_name] = _size("parameter", parameter) | described
        content = {
            "step": progress.done,
            "update": progress.updates,
            "found": {"kind": kind, "tensor": name, "slot": slot, "message": said},
            "losses": {loss_name: _plain(loss.item()) for loss_name, loss in losses.items()},
            "batch": _described(batch),
            "slots": {slot_name: _described(value) for slot_name, value in self.outputs.items()},
            "parameters": parameters,
        }
        path = self.folder / "diagnosis.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
            where = f"statistics are in {shown_path(path)}"
        except OSError as error:
            where = f"no diagnosis could be written ({error})"
        raise DivergedError(
            f"{progress.unit} {progress.done}, update {progress.updates}: {said}; the run was stopped; {where}"
        )

    def _in_order(
        self, batch: Batch, gradients: Mapping[str, Tensor | None], losses: Mapping[str, Tensor]
    ) -> Iterator[tuple[tuple[str, str | None, str | None], Tensor]]:
        """The tensors of an update as they came about, each with its kind, its name and the slot that returned it."""
        yield from ((("batch", name, None), tensor) for name, tensor in named_tensors(batch))
        for slot, output in self.outputs.items():
            yield from ((("slot", name, slot), tensor) for name, tensor in named_tensors(output))
        for name, gradient in gradients.items():
            if gradient is not None:
                yield ("gradient", name, None), gradient
        yield from ((("parameter", name, None), parameter) for name, parameter in self.learner.named_parameters())
        yield from ((("loss", name, "update"), loss) for name, loss in losses.items())

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
        """Raises a RunnerError if by this update a trainable parameter had no finite gradient other than zero."""
        if self.done:
            return
        for name, gradient in self.learner.gradients().items():
            if gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any()):
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


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a slot returned, or that a batch holds, by name."""
    prefix = "" if isinstance(output, Mapping) or hasattr(output, "_asdict") else "output "
    named = ((f"{prefix}{path}".strip(), leaf) for path, leaf in leaves(output))
    return [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Shape and type of a tensor, how many NaN and infinities it holds, and what the finite numbers are like, if any.

    ``std`` is the standard deviation of the population.
    """
    values = _double(tensor)
    finite = values[values.isfinite()]
    counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    described = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **counts}
    if not len(finite):
        return described | dict.fromkeys(("min", "max", "mean", "std"))
    moments = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "std": finite.std(correction=0)}
    return described | {name: _plain(value.item()) for name, value in moments.items()}


def _described(output: Any) -> dict[str, Any]:
    return {name: statistics(tensor) for name, tensor in named_tensors(output)}


def _size(what: str, tensor: Tensor) -> dict[str, Any]:
    """The Euclidean norm of the finite numbers, None if there are none, and how many are not."""
    values = _double(tensor)
    finite = values[values.isfinite()]
    norm = _plain(finite.norm().item()) if len(finite) else None
    return {f"{what}_norm": norm, f"{what}_not_finite": len(values) - len(finite)}


def _double(tensor: Tensor) -> Tensor:
    """All numbers on the host, where there is memory left, and wide enough for sums of squares."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.detach().to("cpu", torch.float64).flatten()


def _plain(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
