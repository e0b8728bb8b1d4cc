"""Stops a training that has diverged or does not train a parameter, and reports the cause as text
and as JSON.
"""

from __future__ import annotations

import json
import logging
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
from runner.system.files import make_folder, write_durably
from runner.system.secrets import redact_values
from runner.system.suggestions import method_named, shown_path
from runner.system.tensor_trees import leaves

FIRST_UPDATES = 20
"""Turns without a gradient after which a parameter is reported."""
WITHOUT_EPOCHS = 0.1
"""Share of a training without epochs in which a parameter may wait for its first gradient."""
HALF = 0.5
"""Share of any training in which a parameter may wait for its first gradient."""
_log = logging.getLogger(__name__)
_RETURNED = "slot '{slot}' returned a tensor '{name}' that is not finite"
_NOWHERE = "a loss was not finite in an earlier update, and nothing in the last one shows from where"


class FiniteGuard:
    """Finds the first number of an update that is not finite.

    It keeps a reference to the last result of every slot of the learner; nothing is checked until a
    loss is not finite.
    """

    def __init__(self, slots: Slots, learner: Learner, folder: Path) -> None:
        """Wraps the slots, to which all stages are attached; a diagnosis is written into ``folder``, the run's."""
        self.learner, self.folder = learner, folder
        self.outputs: dict[str, Any] = {}
        for name in dict.fromkeys(learner.story):
            slots.wrap(name, partial(self._remembered, name))

    def check(
        self, progress: Progress, batch: Batch, output: Mapping[str, Any]
    ) -> None:
        """Raises a DivergedError that names the origin of a number in the last
        update that is not finite.

        The run's folder then holds ``diagnosis.json``, in which NaN, Infinity and -Infinity are strings.
        """
        returned = {
            name: value.sum if isinstance(value, Mean) else value
            for name, value in output.items()
        }
        numbers = {
            name: torch.as_tensor(each)
            for name, each in returned.items()
            if isinstance(each, float | Tensor)
        }
        losses = {name: loss for name, loss in numbers.items() if loss.dim() == 0}
        gradients = {
            name: each
            for name, each in self.learner.gradients().items()
            if each is not None
        }
        in_order = [
            (
                "batch",
                None,
                "tensor '{name}' of the batch is not finite",
                named_tensors(batch),
            ),
            *(
                ("slot", slot, _RETURNED, named_tensors(returned))
                for slot, returned in self.outputs.items()
            ),
            (
                "gradient",
                None,
                "the gradient of '{name}' is not finite",
                gradients.items(),
            ),
            (
                "parameter",
                None,
                "parameter '{name}' is not finite",
                self.learner.named_parameters(),
            ),
            ("loss", "update", _RETURNED, losses.items()),
        ]
        broken = (
            {
                "kind": kind,
                "tensor": name,
                "slot": slot,
                "message": text.format(slot=slot, name=name),
            }
            for kind, slot, text, tensors in in_order
            for name, tensor in tensors
            if not tensor.isfinite().all()
        )
        found = next(
            broken,
            {"kind": "loss", "tensor": None, "slot": "update", "message": _NOWHERE},
        )
        parameters = {}
        for name, parameter in self.learner.named_parameters():
            of_gradient = (
                _size("gradient", gradients[name])
                if name in gradients
                else {"gradient_norm": None}
            )
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
            make_folder(self.folder)
            write_durably(
                path,
                json.dumps(redact_values(content), indent=2, allow_nan=False) + "\n",
            )
            where = f"statistics are in {shown_path(path)}"
        except OSError as error:
            where = f"no diagnosis could be written ({error})"
        place = f"{progress.unit} {progress.done}, update {progress.updates}"
        raise DivergedError(
            f"{place}: {found['message']}; the run was stopped; {where}"
        )

    def _remembered(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            # Compiled code would have to write every result to memory to keep it.
            if torch.compiler.is_compiling():
                return step(*args, **kwargs)
            # The logits of a large vocabulary should not be in memory twice.
            self.outputs.pop(name, None)
            output = self.outputs[name] = step(*args, **kwargs)
            return output

        return remembered


class GradientGuard:
    """Reports parameters that stay untrained, and stops the training if they do so for too long.

    A parameter has ``FIRST_UPDATES`` opportunities: updates in which it is stepped and not idle. A
    warning then names it. The training is stopped later, because a module that is rarely selected
    may wait for its first sample, and the weight of an annealed loss may start at zero: without any
    gradient, after one epoch or half of the training, or after ``WITHOUT_EPOCHS`` of it if the data
    have no epochs; with gradients of zero, after half of it.

    Args:
        learner: A learner whose optimizers are made.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.names = self._trainable_names()
        self.missing = {*self.names.values()}
        self.connected: set[str] = set()
        """The missing parameters that have received a gradient, though of zeros."""
        self.turns: Counter[str] = Counter()
        """Updates in which a missing parameter was not idle."""
        self.warned = False
        self.periods = learner.periods()
        optimizers = list(learner.optimizers())
        self.unstepped = {name for name, _ in optimizers}
        self.role_turns: Counter[str] = Counter()
        """Of roles that were not stepped: updates in which not all of their parameters were idle or frozen."""
        self._hooks = [
            optimizer.register_step_post_hook(partial(self._mark_stepped, name))
            for name, optimizer in optimizers
        ]
        self.done = False
        if unowned := self._without_optimizer(self.names):
            _log.warning(
                "no optimizer has %s: they stay as they are; freeze them with requires_grad_(False), or add them in "
                "configure_optimizers", _listed(unowned),
            )  # fmt: skip

    def check(self, progress: Progress, idle: Collection[str] = ()) -> None:
        """Judges the parameters and roles after an update.

        Args:
            progress: Progress of the training, with this update.
            idle: Parameters that need no gradient in this update.

        Raises:
            RunnerError: A parameter had no finite gradient other than zero, or a role no step, for too long.
        """
        for name, gradient in self.learner.gradients().items():
            if gradient is None or name not in self.missing:
                continue
            if bool(gradient.isfinite().all()) and bool(gradient.any()):
                self.missing.discard(name)
            else:
                self.connected.add(name)
        self._end_if(not self.missing and not self.unstepped)

        awaited = self.missing.difference(idle)
        self.turns.update(awaited)
        self.role_turns.update(self._awaited_roles(idle))
        late = {
            name
            for name in awaited
            if self.turns[name] >= FIRST_UPDATES * self.periods.get(name, 1)
        }
        half = progress.fraction >= HALF
        if self._has_seen_enough(progress):
            self._refuse(progress.updates, late if half else late - self.connected)
            self._refuse_unstepped(progress.updates, FIRST_UPDATES)
        if late and not self.warned:
            self.warned = True
            message = self._message(progress.updates, late)
            _log.warning(
                "%s; the training continues for now, and is stopped if none arrives",
                message,
            )

    def watch_unfrozen(self) -> None:
        """Watches parameters that were unfrozen since the last call.

        Raises:
            RunnerError: No optimizer has one of them.
        """
        names = self._trainable_names()
        unfrozen = {key: name for key, name in names.items() if key not in self.names}
        if not unfrozen:
            return
        if unowned := self._without_optimizer(unfrozen):
            raise RunnerError(
                f"{_listed(unowned)} were unfrozen during the training, and no optimizer has them: add them in "
                f"{type(self.learner).__name__}.configure_optimizers, also while they are frozen"
            )
        self.names |= unfrozen
        self.missing |= {*unfrozen.values()}
        self.done = False

    def end(self, update: int, idle: Collection[str]) -> None:
        """Raises as ``check`` if the training, which is over, was too short for it.

        Gradients of zero may be a beginning, but a parameter that had a turn and no gradient is connected to nothing.
        """
        gradients = self.learner.gradients()
        without = (
            name
            for name in self.missing.difference(idle, self.connected)
            if gradients.get(name) is None
        )
        self._refuse(
            update,
            (name for name in without if self.turns[name] > self.periods.get(name, 1)),
        )
        self._refuse_unstepped(update, 2)

    def state_dict(self) -> State:
        """Returns which parameters have received no gradient yet, and which roles were not stepped."""
        return {
            "missing": sorted(self.missing),
            "connected": sorted(self.connected),
            "turns": dict(self.turns),
            "role_turns": dict(self.role_turns),
            "warned": self.warned,
            "unstepped": sorted(self.unstepped),
            "done": self.done,
        }

    def load_state_dict(self, state: State) -> None:
        """Continues where ``state_dict`` was called; states of earlier versions have fewer entries."""
        self.names = self._trainable_names()
        self.missing = set(state["missing"])
        self.connected = set(state.get("connected", ()))
        self.turns = Counter(state.get("turns", {}))
        self.role_turns = Counter(state.get("role_turns", {}))
        self.warned = state.get("warned", False)
        self.unstepped = set(state.get("unstepped", ()))
        self._end_if(state["done"])

    def _trainable_names(self) -> dict[int, str]:
        named = self.learner.named_parameters()
        return {
            id(parameter): name for name, parameter in named if parameter.requires_grad
        }

    def _without_optimizer(self, names: Mapping[int, str]) -> list[str]:
        """The parameters of these names whose memory no optimizer has; none if optimizers have copies of them all."""
        stepped = {
            parameter.untyped_storage().data_ptr()
            for _, optimizer in self.learner.optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        trainable = [
            (name, each)
            for name, each in self.learner.named_parameters()
            if each.numel()
        ]
        unowned = {
            name
            for name, each in trainable
            if each.untyped_storage().data_ptr() not in stepped
        }
        if len(unowned) == len(trainable):
            return []
        return sorted(unowned.intersection(names.values()))

    @staticmethod
    def _has_seen_enough(progress: Progress) -> bool:
        """Returns whether rare samples have occurred: after every sample once, or
        after a share of the training.
        """
        if progress.epoch_samples is None:
            return progress.fraction >= WITHOUT_EPOCHS
        return progress.fraction >= HALF or progress.samples >= progress.epoch_samples

    def _mark_stepped(self, role: str, *_: Any) -> None:
        self.unstepped.discard(role)

    def _end_if(self, done: bool) -> None:
        self.done = done
        while done and self._hooks:
            self._hooks.pop().remove()

    def _refuse(self, update: int, late: Iterable[str]) -> None:
        names = set(late)
        if names:
            raise RunnerError(self._message(update, names))

    def _message(self, update: int, names: Collection[str]) -> str:
        only_zeros = " other than zero" if self.connected.issuperset(names) else ""
        return (
            f"no gradient{only_zeros} has reached {_listed(names)} in the first {update} updates: a module is "
            f"detached, or no loss uses it; name what may wait in {type(self.learner).__name__}.idle(progress), or "
            "freeze it with requires_grad_(False)"
        )

    def _awaited_roles(self, idle: Collection[str]) -> set[str]:
        """The roles that were not stepped yet and have a parameter that is neither idle nor frozen."""
        awaited: set[str] = set()
        for name, optimizer in self.learner.optimizers():
            parameters = (
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
            names = {
                self.names.get(id(parameter), "")
                for parameter in parameters
                if parameter.requires_grad
            }
            if name in self.unstepped and not names <= {*idle}:
                awaited.add(name)
        return awaited

    def _refuse_unstepped(self, update: int, turns: int) -> None:
        """Raises a RunnerError for a role that was not stepped in the given
        number of opportunities.
        """
        for name in sorted(self.unstepped):
            every = getattr(self.learner.roles.get(name), "every", 1)
            if self.role_turns[name] >= turns * every:
                raise RunnerError(
                    f"the optimizer of role '{name}' was not stepped in the first {update} updates: "
                    f"{method_named(self.learner, 'update')} should call step() of that role, or "
                    f"{type(self.learner).__name__}.idle(progress) name its parameters as long as it waits"
                )


def _listed(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:5])
    return f"{first}{' ...' if len(names) > 5 else ''} ({len(names)} parameters)"


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a slot returned, or that a batch holds, by name."""
    prefix = (
        "" if isinstance(output, Mapping) or hasattr(output, "_asdict") else "output "
    )
    named = ((f"{prefix}{path}".strip(), leaf) for path, leaf in leaves(output))
    return [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Shape and type of a tensor, how many NaN and infinities it holds, and what the finite numbers are like, if any.

    ``std`` is the standard deviation of the population.
    """
    values = _double(tensor)
    finite = values[values.isfinite()]
    counts = {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    described = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        **counts,
    }
    if not len(finite):
        return described | dict.fromkeys(("min", "max", "mean", "std"))
    moments = {
        "min": finite.min(),
        "max": finite.max(),
        "mean": finite.mean(),
        "std": finite.std(correction=0),
    }
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
    """Converts to float64 on the host, which has free memory and is wide enough
    for sums of squares.
    """
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.detach().to("cpu", torch.float64).flatten()


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else json.dumps(number)
