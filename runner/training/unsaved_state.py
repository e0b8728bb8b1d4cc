"""Finds state of plugins that no checkpoint contains: attributes that updates change, and that a
resumed training would not restore.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.plugin.learner import GradientLearner, Learner
from runner.plugin.source import Source
from runner.system.errors import RunnerError
from runner.system.tensor_trees import real_numbers, tensors

if TYPE_CHECKING:
    from runner.training.pipeline import Assembly

_log = logging.getLogger(__name__)

# Elements of a tensor, and of a container, that are compared. A step of an optimizer changes most
# of a module's tensor, and a buffer of samples gets a few rows.
_ELEMENTS = 2**16
_ELEMENTS_OF_MODULE = 2**8
_ITEMS = 64
_PRIVATE_NAMES = {
    name
    for base in (Learner, GradientLearner, Source)
    for method in vars(base).values()
    if isfunction(method)
    for name in method.__code__.co_names
    if name.startswith("_")
}
"""Private attributes of the base classes."""
_PLAIN = (Learner.state_dict, GradientLearner.state_dict, Source.state_dict)


class UnsavedState:
    """Compares attributes of the learner and the source with those before the training.

    Args:
        pipeline: A pipeline that has drawn no batch yet.
    """

    def __init__(self, pipeline: Assembly) -> None:
        learner, source = pipeline.learner, pipeline.source
        self._context = learner.context
        # Datasets and simulators of the runner keep their state themselves. Of several processes,
        # each may have a part of a tensor.
        self._owners: list[Any] = []
        if self._context.processes is None:
            self._owners.append(learner)
            if type(source).state_dict is Source.state_dict:
                self._owners.append(source)
        self._before = [dict(self._attributes(owner)) for owner in self._owners]
        self._is_reported = False

    def check(self, is_first: bool = False) -> None:
        """Reports changed attributes that are in no state, once.

        Args:
            is_first: Whether nothing is lost if the training stops now.

        Raises:
            RunnerError: The first update has changed a module that no checkpoint contains.
        """
        if self._is_reported:
            return
        for owner, before in zip(self._owners, self._before, strict=True):
            changed = [
                name
                for name, summary in self._attributes(owner)
                if before.get(name) != summary
            ]
            unsaved = sorted(_unsaved(owner, changed))
            if unsaved:
                self._is_reported = True
                self._report(owner, unsaved, is_first=is_first)

    def _report(self, owner: Any, unsaved: Sequence[str], *, is_first: bool) -> None:
        owner_name = type(owner).__name__
        names = " and ".join(f"{owner_name}.{name}" for name in unsaved)
        message = (
            f"{names}: changed by the training and in no checkpoint, so that a resumed run would "
            f"begin with other values; return it from {owner_name}.state_dict() and restore it in "
            "load_state_dict(state)"
        )
        has_module = any(isinstance(vars(owner)[name], nn.Module) for name in unsaved)
        if has_module and is_first:
            raise RunnerError(message)
        _log.warning(
            "%s. If it need not be kept, override state_dict() without it", message
        )

    def _attributes(self, owner: Any) -> Iterator[tuple[str, Any]]:
        """Yields the attributes that may be state, each with a summary to compare."""
        generators = {id(generator) for generator in self._context.generators.values()}
        for name, value in vars(owner).items():
            if name in _PRIVATE_NAMES or id(value) in generators:
                continue
            summary = _summary(value)
            if summary is not None:
                yield name, summary


def _unsaved(owner: Any, changed: Sequence[str]) -> Iterator[str]:
    """Yields those of some attributes that the owner's state does not contain.

    Where a plugin has a ``state_dict`` of its own, only modules are looked for in it.
    """
    if not changed:
        return
    saved = _tensors_of(owner.state_dict())
    addresses = {tensor.data_ptr() for tensor in saved}
    is_plain = type(owner).state_dict in _PLAIN
    for name in changed:
        value = vars(owner)[name]
        if not (is_plain or isinstance(value, nn.Module)):
            continue
        held = _tensors_of(value)
        # A state may also have copies.
        missing = [tensor for tensor in held if tensor.data_ptr() not in addresses]
        if not held or not all(
            any(_is_equal(tensor, copy) for copy in saved) for tensor in missing
        ):
            yield name


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    return (
        tensor.shape == copy.shape
        and tensor.dtype == copy.dtype
        and torch.equal(tensor, copy)
    )


def _tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of a module's state, or of a tree, whose numbers can be read."""
    tree = value.state_dict() if isinstance(value, nn.Module) else value
    if not isinstance(tree, Tensor | list | tuple | dict):
        return []
    return [tensor for tensor in tensors(tree) if _is_readable(tensor)]


def _is_readable(tensor: Tensor) -> bool:
    """Returns whether a tensor is dense, and of no type of its own, which may lack a storage."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    return is_dense and type(tensor) in (Tensor, nn.Parameter)


def _summary(value: Any) -> Any:
    """Returns a value that differs if numbers of another one differ; None for other objects."""
    if isinstance(value, int | float | complex | str | bytes):
        return value
    if isinstance(value, nn.Module):
        return [_sum(tensor, _ELEMENTS_OF_MODULE) for tensor in _tensors_of(value)]
    if isinstance(value, Tensor):
        return (*value.shape, _sum(value, _ELEMENTS)) if _is_readable(value) else None
    if isinstance(value, np.ndarray):
        return value.shape, value.reshape(-1)[:_ELEMENTS].tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return len(value), _summary([*value.values()])
    if isinstance(value, list | tuple | set | deque):
        last = [*value][-_ITEMS:]
        return len(value), [_summary(item) for item in last]
    return None


def _sum(tensor: Tensor, elements: int) -> float:
    step = max(1, tensor.numel() // elements)
    sample = real_numbers(tensor.detach()).reshape(-1)[::step]
    return sample.double().nan_to_num().sum().item()
