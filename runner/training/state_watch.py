"""Detects whether foreign code changes the state of a learner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from runner.plugin.learner import Learner
from runner.training.checksum import checksum


@dataclass(frozen=True)
class Look:
    """The state of a learner at one moment.

    Attributes:
        tensors: Parameters, buffers, averages and states of optimizers, by name.
        marks: Version counter and address of each tensor.
        settings: Numbers and switches of optimizers; in a complete look, of modules and parameters,
            too.
        checksums: A number for each tensor; None in a quick look.
    """

    tensors: dict[str, Tensor]
    marks: list[tuple[int, int]]
    settings: dict[str, Any]
    checksums: Tensor | None


class StateWatch:
    """Compares the state of a learner before and after foreign code.

    A quick look reads no numbers: it detects changes in place and tensors that were replaced. What
    writes through ``.data`` changes no version counter, so only a complete look detects it, which
    reads all numbers once.

    Args:
        learner: A learner whose optimizers are made.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._tensors: dict[str, Tensor] = {}

    def look(self, is_complete: bool) -> Look:
        """Returns the present state.

        Args:
            is_complete: Whether numbers are read, and tensors, modes of modules and switches of
                parameters are collected again.
        """
        if is_complete or not self._tensors:
            self._tensors = dict(_named_tensors(self._learner))
        settings = dict(_optimizer_settings(self._learner))
        if is_complete:
            settings |= _switches(self._learner)
        present = list(self._tensors.values())
        sums = checksum(present) if is_complete else None
        return Look(self._tensors, [*map(_mark, present)], settings, sums)

    def change_since(self, before: Look) -> str:
        """Returns the name of something that has changed since a look; empty if nothing has."""
        after = self.look(before.checksums is not None)
        for name in before.settings.keys() | after.settings.keys():
            if before.settings.get(name) != after.settings.get(name):
                return name
        names = list(after.tensors)
        if before.checksums is None:
            return "" if before.marks == after.marks else _first(names, before, after)
        if list(before.tensors) != names:
            return min(before.tensors.keys() ^ after.tensors.keys())
        assert after.checksums is not None
        if torch.equal(before.checksums, after.checksums):
            return _replaced(before, after)
        index = int((before.checksums != after.checksums).nonzero()[0])
        return names[index]


def _first(names: list[str], before: Look, after: Look) -> str:
    pairs = zip(names, before.marks, after.marks, strict=True)
    return next(name for name, earlier, later in pairs if earlier != later)


def _replaced(before: Look, after: Look) -> str:
    """Returns the name of a tensor in whose place there is another object with equal numbers."""
    for name, tensor in after.tensors.items():
        if before.tensors[name] is not tensor:
            return name
    return ""


def _mark(tensor: Tensor) -> tuple[int, int]:
    # Tensors of inference mode have no version counter.
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr()


def _named_tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yields everything with numbers that an update changes."""
    for module_name, module in learner.modules().items():
        members = chain(module.named_parameters(), module.named_buffers())
        for name, tensor in members:
            if _has_memory(tensor):
                yield f"{module_name}.{name}", tensor
    averages = {} if learner.averages is None else learner.averages.values
    for name, average in averages.items():
        yield f"average of {name}", average
    for role, optimizer in learner.optimizers():
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor) and _has_memory(value):
                    yield f"optimizer.{role}.state.{number}.{key}", value


def _has_memory(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout == torch.strided


def _optimizer_settings(learner: Learner) -> Iterator[tuple[str, Any]]:
    """Yields learning rates and the like, by name."""
    for role, optimizer in learner.optimizers():
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                # Parameters are compared as tensors; a captured update has its rate in a tensor.
                if key != "params":
                    number_of = float(value) if isinstance(value, Tensor) else value
                    yield f"optimizer.{role}.groups.{number}.{key}", number_of


def _switches(learner: Learner) -> dict[str, Any]:
    """Returns the modes of modules, and which parameters need gradients."""
    switches: dict[str, Any] = {}
    for module_name, module in learner.modules().items():
        for name, layer in module.named_modules():
            switches[f"mode of {module_name}.{name}".rstrip(".")] = layer.training
        for name, parameter in module.named_parameters():
            switches[f"requires_grad of {module_name}.{name}"] = parameter.requires_grad
    return switches
