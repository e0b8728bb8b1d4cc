"""Stops a training that has gone wrong, and says where: to a person, and as JSON to a program."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.plugin.context import Slots
from runner.plugin.contract import Mean
from runner.plugin.learner import Learner
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, State
from runner.system.errors import DivergedError, RunnerError
from runner.system.files import write_durably
from runner.system.names import method_named, shown_path
from runner.system.tree import leaves

FIRST_UPDATES = 20
"""By then, every trainable parameter that is stepped in each update must have received a gradient."""
_RETURNED = "slot '{slot}' returned a tensor '{name}' that is not finite"
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
        """Raises a DivergedError that says where a number came from that is not finite, in the last update.

        The run's folder then holds ``diagnosis.json``, in which NaN, Infinity and -Infinity are strings.
        """
        returned = {name: value.sum if isinstance(value, Mean) else value for name, value in output.items()}
        numbers = {name: torch.as_tensor(each) for name, each in returned.items() if isinstance(each, float | Tensor)}
        losses = {name: loss for name, loss in numbers.items() if loss.dim() == 0}
        gradients = {name: each for name, each in self.learner.gradients().items() if each is not None}
        in_order = [
            ("batch", None, "tensor '{name}' of the batch is not finite", named_tensors(batch)),
            *(("slot", slot, _RETURNED, named_tensors(returned)) for slot, returned in self.outputs.items()),
            ("gradient", None, "the gradient of '{name}' is not finite", gradients.items()),
            ("parameter", None, "parameter '{name}' is not finite", self.learner.named_parameters()),
            ("loss", "update", _RETURNED, losses.items()),
        ]
        broken = (
            {"kind": kind, "tensor": name, "slot": slot, "message": text.format(slot=slot, name=name)}
            for kind, slot, text, tensors in in_order
            for name, tensor in tensors
            if not tensor.isfinite().all()
        )
        found = next(broken, {"kind": "loss", "tensor": None, "slot": "update", "message": _NOWHERE})
        parameters = {}
        for name, parameter in self.learner.named_parameters():
            of_gradient = _size("gradient", gradients[name]) if name in gradients else {"gradient_norm": None}
            parameters[name] = _size("parameter", parameter) | of_gradient
        content = {
            "step": progress.done,
            "update": progress.updates,
            "found": found,
            "losses": {name: _plain(loss.item()) for name, loss in losses.items()},
            "batch": _described(batch),
            "slots": {slot: _described(value) for slot, value in self.outputs.items()},
            "parameters": parameters,
        }
        path = self.folder / "diagnosis.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
            where = f"statistics are in {shown_path(path)}"
        except OSError as error:
            where = f"no diagnosis could be written ({error})"
        place = f"{progress.unit} {progress.done}, update {progress.updates}"
        raise DivergedError(f"{place}: {found['message']}; the run was stopped; {where}")

    def _remembered(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            output = self.outputs[name] = step(*args, **kwargs)
            return output

        return remembered


class GradientGuard:
    """Sees to it that no part of the model stays untrained in silence."""

    def __init__(self, learner: Learner) -> None:
        """Begins to watch a learner whose optimizers are made."""
        self.learner = learner
        self.names = {id(parameter): name for name, parameter in learner.named_parameters() if parameter.requires_grad}
        self.missing = {*self.names.values()}
        self.chances: Counter[str] = Counter()
        """Of those that are missing: updates in which they were not idle."""
        self.periods = learner.periods()
        made = list(learner.optimizers())
        self.unstepped = {name for name, _ in made}
        self._hooks = [each.register_step_post_hook(partial(self._stepped, name)) for name, each in made]
        self.done = False

    def check(self, update: int, idle: Collection[str] = ()) -> None:
        """Raises a RunnerError if by this update a trainable parameter had no finite gradient other than zero.

        Or if a role was never stepped. Those that are idle in this update may have none.
        """
        for name, gradient in self.learner.gradients().items():
            if gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any()):
                self.missing.discard(name)
        self._end_if(not self.missing and not self.unstepped)
        awaited = self.missing.difference(idle)
        self.chances.update(awaited)
        self._refuse(update, (name for name in awaited if update >= FIRST_UPDATES * self.periods.get(name, 1)))
        self._refuse_unstepped(update, FIRST_UPDATES, idle)

    def end(self, update: int, idle: Collection[str]) -> None:
        """Raises as ``check`` if the training, which is over, was too short for it.

        Here zeros are believed to be a beginning, but who had a turn and no gradient at all is connected to nothing.
        """
        gradients = self.learner.gradients()
        without = (name for name in self.missing.difference(idle) if gradients[name] is None)
        self._refuse(update, (name for name in without if self.chances[name] > self.periods.get(name, 1)))
        self._refuse_unstepped(update - 1, 1, idle)

    def state_dict(self) -> State:
        """Which parameters have received no gradient yet, and which roles were not stepped."""
        return {"missing": sorted(self.missing), "unstepped": sorted(self.unstepped), "done": self.done}

    def load_state_dict(self, state: State) -> None:
        """Goes on judging where ``state_dict`` was asked: neither anew nor more leniently."""
        self.missing, self.unstepped = set(state["missing"]), set(state.get("unstepped", ()))  # once there was no such
        self._end_if(state["done"])

    def _stepped(self, role: str, *_: Any) -> None:
        self.unstepped.discard(role)

    def _end_if(self, done: bool) -> None:
        self.done = done
        while done and self._hooks:
            self._hooks.pop().remove()

    def _refuse(self, update: int, late: Iterable[str]) -> None:
        names = sorted(late)
        if names:
            raise RunnerError(
                f"no gradient has reached {', '.join(names[:5])}{' ...' if len(names) > 5 else ''} "
                f"({len(names)} parameters) in the first {update} updates: a module is detached, or no loss uses it"
            )

    def _refuse_unstepped(self, update: int, turns: int, idle: Collection[str]) -> None:
        """Raises a RunnerError about a role that had so many turns, unless all that it trains is idle."""
        for name, optimizer in self.learner.optimizers():
            every = getattr(self.learner.roles.get(name), "every", 1)
            if name not in self.unstepped or update < turns * every:
                continue
            own = {self.names.get(id(each)) for group in optimizer.param_groups for each in group["params"]}
            if not own <= {*idle}:
                raise RunnerError(
                    f"the optimizer of role '{name}' was not stepped in the first {update} updates: "
                    f"{method_named(self.learner, 'update')} should call step() of that role"
                )


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
    return number if math.isfinite(number) else json.dumps(number)
