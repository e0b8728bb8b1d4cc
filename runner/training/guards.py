"""Stops a training that has diverged or does not train a parameter, and reports the cause."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.plugin.context import Slots
from runner.plugin.contract import Mean
from runner.plugin.learner import GradientLearner, Learner
from runner.plugin.loss import Loss
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, State
from runner.system.errors import DivergedError, RunnerError
from runner.system.files import make_folder, write_durably
from runner.system.secrets import redact_values
from runner.system.stored_json import json_number, json_text
from runner.system.suggestions import method_named, shown_path
from runner.system.tensor_trees import as_float64, leaves, stored_numbers

# Opportunities without a gradient after which a parameter is reported.
FIRST_UPDATES = 20
# Without epochs, rare samples are expected to have occurred after this share of a training.
WITHOUT_EPOCHS = 0.1
# An annealed loss may start at zero, but not for longer than this share of a training.
HALF = 0.5
_log = logging.getLogger(__name__)
_RETURNED = "slot '{slot}' returned a tensor '{name}' that is not finite"
_MESSAGES = {
    "batch": "tensor '{name}' of the batch is not finite",
    "slot": _RETURNED,
    "gradient": "the gradient of '{name}' is not finite",
    "parameter": "parameter '{name}' is not finite",
    "loss": _RETURNED,
}
_NOWHERE = (
    "a loss was not finite in an earlier update, "
    "and nothing in the last one shows from where"
)


class FiniteGuard:
    """Finds the first number of an update that is not finite.

    It keeps a reference to the last result of every slot of the learner; nothing is checked until a
    loss is not finite.

    Args:
        slots: The slots, to which all stages are attached.
        learner: The learner.
        folder: Folder of the run, for a diagnosis.
        is_traced: Whether a stage compiles slots.
    """

    def __init__(
        self, slots: Slots, learner: Learner, folder: Path, is_traced: bool = False
    ) -> None:
        self.learner = learner
        self.folder = folder
        self.outputs: dict[str, Any] = {}
        for name in dict.fromkeys(learner.story):
            slots.record(name, self.outputs, is_traced=is_traced)

    def check(
        self, progress: Progress, batch: Batch, output: Mapping[str, Any]
    ) -> None:
        """Finds the origin of a number in the last update that is not finite.

        The run's folder then holds ``diagnosis.json``, in which NaN, Infinity and -Infinity are
        strings.

        Raises:
            DivergedError: Always; the message names the origin.
        """
        scalars = _scalars(output)
        gradients = self._gradients()
        origin = self._origin(batch, gradients, scalars)
        diagnosis = {
            "step": progress.done,
            "update": progress.updates,
            "found": origin,
            "losses": {name: value.item() for name, value in scalars.items()},
            "batch": _described(batch),
            "slots": {slot: _described(value) for slot, value in self.outputs.items()},
            "parameters": self._parameter_sizes(gradients),
        }
        remark = self._write(diagnosis)
        raise DivergedError(
            f"{progress.unit} {progress.done}, update {progress.updates}: "
            f"{origin['message']}; the run was stopped; {remark}"
        )

    def origin_of(
        self, batch: Batch, output: Mapping[str, Any]
    ) -> dict[str, str | None]:
        """Returns the first tensor of the last update that is not finite, and a message."""
        return self._origin(batch, self._gradients(), _scalars(output))

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: self.learner.whole(gradient)
            for name, gradient in self.learner.gradients().items()
            if gradient is not None
        }

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.learner.named_parameters():
            yield name, self.learner.whole(parameter)

    def _origin(
        self,
        batch: Batch,
        gradients: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
    ) -> dict[str, str | None]:
        """Returns the first tensor that is not finite, in the order of an update."""
        losses = [
            (name, value)
            for name, value in scalars.items()
            if is_loss(self.learner, name)
        ]
        slots = [
            (slot, _without_metrics(output)) for slot, output in self.outputs.items()
        ]
        candidates: list[tuple[str, str | None, Iterable[tuple[str, Tensor]]]] = [
            ("batch", None, named_tensors(batch)),
            *(("slot", slot, named_tensors(output)) for slot, output in slots),
            ("gradient", None, gradients.items()),
            ("parameter", None, self._parameters()),
            ("loss", "update", losses),
        ]
        for kind, slot, tensors in candidates:
            for name, tensor in tensors:
                if not stored_numbers(tensor).isfinite().all():
                    message = _MESSAGES[kind].format(slot=slot, name=name)
                    return {
                        "kind": kind,
                        "tensor": name,
                        "slot": slot,
                        "message": message,
                    }
        # On a GPU, losses are checked rarely: later updates may have overwritten the origin.
        return {"kind": "loss", "tensor": None, "slot": "update", "message": _NOWHERE}

    def _parameter_sizes(
        self, gradients: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Any]]:
        sizes = {}
        for name, parameter in self._parameters():
            gradient_size: dict[str, Any] = {"gradient_norm": None}
            if name in gradients:
                gradient_size = _size("gradient", gradients[name])
            sizes[name] = _size("parameter", parameter) | gradient_size
        return sizes

    def _write(self, diagnosis: Mapping[str, Any]) -> str:
        """Writes the diagnosis into the folder, and returns where it is, for a message."""
        path = self.folder / "diagnosis.json"
        text = json_text(redact_values(diagnosis), indent=2)
        try:
            make_folder(self.folder)
            write_durably(path, text + "\n")
        except OSError as error:
            return f"no diagnosis could be written ({error})"
        return f"statistics are in {shown_path(path)}"


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
        # The missing parameters that have received a gradient, though of zeros.
        self.connected: set[str] = set()
        # Updates in which a missing parameter was not idle.
        self.turns: Counter[str] = Counter()
        self.warned = False
        self.periods = learner.periods()
        optimizers = list(learner.optimizers())
        self.unstepped = {name for name, _ in optimizers}
        # Updates in which a role had a parameter that was neither idle nor frozen.
        self.role_turns: Counter[str] = Counter()
        self._hooks = [
            optimizer.register_step_post_hook(partial(self._mark_stepped, name))
            for name, optimizer in optimizers
        ]
        self.done = False
        unowned = self._without_optimizer(self.names)
        if unowned:
            _log.warning(
                "no optimizer has %s: they stay as they are; "
                "freeze them with requires_grad_(False), or add them in "
                "configure_optimizers",
                _listed(unowned),
            )

    def check(self, progress: Progress, idle: Collection[str] = ()) -> None:
        """Judges the parameters and roles after an update.

        Args:
            progress: Progress of the training, with this update.
            idle: Parameters that need no gradient in this update.

        Raises:
            RunnerError: A parameter had no finite gradient other than zero, or a role no step, for
                too long.
        """
        for name, gradient in self.learner.gradients().items():
            if gradient is None or name not in self.missing:
                continue
            whole = self.learner.whole
            numbers = stored_numbers(gradient)
            if bool(whole(numbers.isfinite().all())) and bool(whole(numbers.any())):
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
        if self._has_seen_enough(progress):
            # A gradient of zeros may become another one, but not after half of the training.
            is_half_done = progress.fraction >= HALF
            refused = late if is_half_done else late - self.connected
            self._refuse(progress.updates, refused)
            self._refuse_unstepped(progress.updates, FIRST_UPDATES)
        if late and not self.warned:
            self.warned = True
            message = self._message(progress.updates, late)
            continuation = (
                "the training continues for now, and is stopped if none arrives"
            )
            _log.warning("%s; %s", message, continuation)

    def watch_unfrozen(self) -> None:
        """Watches parameters that were unfrozen since the last call.

        Raises:
            RunnerError: No optimizer has one of them.
        """
        names = self._trainable_names()
        unfrozen = {key: name for key, name in names.items() if key not in self.names}
        if not unfrozen:
            return
        unowned = self._without_optimizer(unfrozen)
        if unowned:
            raise RunnerError(
                f"{_listed(unowned)} were unfrozen during the training, and no optimizer has "
                f"them: add them in {type(self.learner).__name__}.configure_optimizers, "
                "also while they are frozen"
            )
        self.names |= unfrozen
        self.missing |= {*unfrozen.values()}
        self.done = False

    def end(self, update: int, idle: Collection[str]) -> None:
        """Raises as ``check`` after a training that was too short for it.

        Gradients of zero may become others, but a parameter that had an opportunity and has no
        gradient is connected to nothing.
        """
        gradients = self.learner.gradients()
        missing = self.missing.difference(idle, self.connected)
        unreached = [name for name in missing if gradients.get(name) is None]
        late = {
            name for name in unreached if self.turns[name] > self.periods.get(name, 1)
        }
        self._refuse(update, late)
        self._refuse_unstepped(update, 2)

    def state_dict(self) -> State:
        """Returns which parameters and roles have not been trained yet, and their opportunities."""
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
        """Restores what ``state_dict`` returned; earlier versions stored fewer entries."""
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

    def _address(self, parameter: Tensor) -> int:
        """Returns where the numbers of a parameter are in the memory of this process."""
        sharding = self.learner.sharding
        held = parameter if sharding is None else sharding.part_of(parameter)
        return held.untyped_storage().data_ptr()

    def _without_optimizer(self, names: Mapping[int, str]) -> list[str]:
        """Returns the parameters of these names whose memory no optimizer has.

        Optimizers may have copies of all parameters; then none is returned.
        """
        # An optimizer may have a stacked tensor, of which the parameters are views.
        stepped = {
            self._address(parameter)
            for _, optimizer in self.learner.optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        addresses = {
            name: self._address(parameter)
            for name, parameter in self.learner.named_parameters()
            if parameter.numel()
        }
        unowned = {
            name for name, address in addresses.items() if address not in stepped
        }
        if len(unowned) == len(addresses):
            return []
        return sorted(unowned.intersection(names.values()))

    @staticmethod
    def _has_seen_enough(progress: Progress) -> bool:
        """Returns whether rare samples have occurred by now."""
        if progress.epoch_samples is None:
            return progress.fraction >= WITHOUT_EPOCHS
        return progress.fraction >= HALF or progress.samples >= progress.epoch_samples

    def _mark_stepped(self, role: str, *_: Any) -> None:
        self.unstepped.discard(role)

    def _end_if(self, done: bool) -> None:
        self.done = done
        # Hooks cost time in every step.
        while done and self._hooks:
            self._hooks.pop().remove()

    def _refuse(self, update: int, names: Collection[str]) -> None:
        if names:
            raise RunnerError(self._message(update, names))

    def _message(self, update: int, names: Collection[str]) -> str:
        only_zeros = " other than zero" if self.connected.issuperset(names) else ""
        return (
            f"no gradient{only_zeros} has reached {_listed(names)} in the first {update} "
            "updates: a module is detached, or no loss uses it; name what may wait in "
            f"{type(self.learner).__name__}.idle(progress), or freeze it with "
            "requires_grad_(False)"
        )

    def _awaited_roles(self, idle: Collection[str]) -> set[str]:
        """Returns the roles without a step that have a parameter neither idle nor frozen."""
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
        """Raises a RunnerError for a role without a step in that number of opportunities."""
        for name in sorted(self.unstepped):
            period = getattr(self.learner.roles.get(name), "every", 1)
            if self.role_turns[name] >= turns * period:
                raise RunnerError(
                    f"the optimizer of role '{name}' was not stepped in the first {update} "
                    f"updates: {method_named(self.learner, 'update')} should call step() of "
                    f"that role, or {type(self.learner).__name__}.idle(progress) name its "
                    "parameters as long as it waits"
                )


def is_loss(learner: Learner, name: str) -> bool:
    """Returns whether a scalar that an update returned has to be finite.

    A ``GradientLearner`` has one loss; its other scalars are metrics, which may have no value. A
    learner with its own update may give its losses any name, so each of its scalars is one.
    """
    has_own_update = type(learner).update is not GradientLearner.update
    return has_own_update or name == "loss"


def _without_metrics(output: Any) -> Any:
    """Returns a slot's result without metrics, which may have no value."""
    return output._replace(also={}) if isinstance(output, Loss) else output


def _listed(names: Collection[str]) -> str:
    text = ", ".join(sorted(names)[:5])
    if len(names) > 5:
        text += " ..."
    return f"{text} ({len(names)} parameters)"


def _scalars(output: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the scalars that an update returned, and the sums of its means."""
    scalars = {}
    for name, value in output.items():
        number = value.sum if isinstance(value, Mean) else value
        if isinstance(number, float | Tensor):
            tensor = torch.as_tensor(number)
            if tensor.dim() == 0:
                scalars[name] = tensor
    return scalars


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a slot's result or of a batch, by name."""
    has_names = isinstance(output, Mapping) or hasattr(output, "_asdict")
    prefix = "" if has_names else "output "
    return [
        (f"{prefix}{path}".strip(), leaf)
        for path, leaf in leaves(output)
        if isinstance(leaf, Tensor)
    ]


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Returns shape, type, counts of NaN and infinities, and moments of the finite numbers.

    ``std`` is the standard deviation of the population.
    """
    # Wide enough for sums of squares, on the host, which has free memory.
    values = as_float64(tensor).flatten()
    finite = values[values.isfinite()]
    described = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }
    if not len(finite):
        return described | dict.fromkeys(("min", "max", "mean", "std"))
    moments = {
        "min": finite.min(),
        "max": finite.max(),
        "mean": finite.mean(),
        "std": finite.std(correction=0),
    }
    return described | {
        name: json_number(value.item()) for name, value in moments.items()
    }


def _described(output: Any) -> dict[str, Any]:
    return {name: statistics(tensor) for name, tensor in named_tensors(output)}


def _size(kind: str, tensor: Tensor) -> dict[str, Any]:
    """Returns the Euclidean norm of the finite numbers, if there are any, and how many are not."""
    # Wide enough for sums of squares, on the host, which has free memory.
    values = as_float64(tensor).flatten()
    finite = values[values.isfinite()]
    norm = json_number(finite.norm().item()) if len(finite) else None
    return {f"{kind}_norm": norm, f"{kind}_not_finite": len(values) - len(finite)}
