"""Finds state of plugins that no checkpoint contains: attributes that updates change, and that a
resumed training would not restore.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.plugin.learner import GradientLearner, Learner
from runner.plugin.plugin_errors import is_class_of_plugin
from runner.plugin.registry import file_modules
from runner.plugin.source import Source
from runner.system.errors import RunnerError
from runner.system.tensor_trees import real_numbers, tensors
from runner.training.nested_state import ITEMS, is_dataset, nested_values

if TYPE_CHECKING:
    from runner.training.pipeline import Assembly

_log = logging.getLogger(__name__)

# Elements of a tensor, and of a container, that are compared. A step of an optimizer changes most
# of a module's tensor, and a buffer of samples gets a few rows.
_ELEMENTS = 2**16
_ELEMENTS_OF_MODULE = 2**8
_NAMES = 5
"""Values that a message names."""
_REPETITIONS = 2
"""Changes of a value between two checks, from which it is no cache."""
_REPETITIONS_OF_INTEGER = 3
"""The same for an integer, which may be the largest size so far of a cache."""
_PRIVATE_NAMES = {
    name
    for base in (Learner, GradientLearner, Source)
    for method in vars(base).values()
    if isfunction(method)
    for name in method.__code__.co_names
    if name.startswith("_")
}
"""Private attributes of the base classes."""
_PLAIN = frozenset(f"runner.plugin.{name}" for name in ("learner", "source", "dataset"))
"""Modules whose ``state_dict`` knows nothing of attributes that a plugin adds."""


class UnsavedState:
    """Compares values of the learner and the source with those before the training.

    Attributes are reported as soon as they have changed. What is inside of them, of modules, of
    optimizers and of plugin files may also be a cache, which is filled once, or a result for later
    in the same update. It is reported if it was there before the training and changes
    repeatedly, or is a tensor that changes in place after the first check, or a flag.

    Args:
        pipeline: A pipeline that has drawn no batch yet.
    """

    def __init__(self, pipeline: Assembly) -> None:
        learner, source = pipeline.learner, pipeline.source
        self._context = learner.context
        self._modules = file_modules(pipeline.plugin_files)
        # Simulators of the runner keep their state themselves. Of several processes, each may have
        # a part of a tensor.
        self._owners: list[Any] = []
        if self._context.processes is None:
            self._owners.append(learner)
            if _is_plain(source):
                self._owners.append(source)
        self._reported: set[str] = set()
        self._before = [dict(self._attributes(owner)) for owner in self._owners]
        self._nested = [_NestedChanges() for _ in self._owners]
        for owner, changes in zip(self._owners, self._nested, strict=True):
            changes.start(self._nested_values(owner))

    def check(self, is_first: bool = False) -> None:
        """Reports changed values that are in no state, each of them once.

        Args:
            is_first: Whether nothing is lost if the training stops now.

        Raises:
            RunnerError: The first update has changed a module that no checkpoint contains.
        """
        for number, owner in enumerate(self._owners):
            before = self._before[number]
            changed = {
                f"{type(owner).__name__}.{name}": vars(owner)[name]
                for name, summary in self._attributes(owner)
                if before.get(name) != summary
            }
            nested = self._nested[number].update(self._nested_values(owner))
            unsaved = _unsaved_of(owner, changed, self._reported)
            has_module = any(isinstance(value, nn.Module) for value in unsaved.values())
            unsaved |= _unsaved_of(owner, nested, self._reported | unsaved.keys())
            if unsaved:
                self._reported |= unsaved.keys()
                self._report(owner, sorted(unsaved), is_refused=has_module and is_first)

    def _report(self, owner: Any, paths: Sequence[str], *, is_refused: bool) -> None:
        owner_name = type(owner).__name__
        names = " and ".join(paths[:_NAMES])
        if len(paths) > _NAMES:
            names += f" and {len(paths) - _NAMES} more"
        message = (
            f"{names}: changed by the training and in no checkpoint, so that a resumed run would "
            f"begin with other values; return it from {owner_name}.state_dict() and restore it in "
            "load_state_dict(state)"
        )
        if is_refused:
            raise RunnerError(message)
        _log.warning(
            "%s. If it need not be kept, override state_dict() without it", message
        )

    def _attributes(self, owner: Any) -> Iterator[tuple[str, Any]]:
        """Yields the attributes that may be state, each with a summary to compare."""
        # A dataset often has caches, so that its attributes are compared like those inside of it.
        if is_dataset(owner):
            return
        generators = self._generators()
        for name, value in vars(owner).items():
            if name in _PRIVATE_NAMES or id(value) in generators:
                continue
            summary = _summary(value)
            if summary is not None:
                yield name, summary

    def _nested_values(self, owner: Any) -> Iterator[tuple[str, Any]]:
        # The author of another method has decided what is state.
        if _is_plain(owner):
            yield from nested_values(
                owner,
                self._modules,
                is_class_of_plugin,
                self._generators(),
                _PRIVATE_NAMES,
            )

    def _generators(self) -> set[int]:
        return {id(generator) for generator in self._context.generators.values()}


def _is_plain(owner: Any) -> bool:
    """Returns whether the class of a learner or source has no ``state_dict`` of a plugin."""
    return type(owner).state_dict.__module__ in _PLAIN


def _is_inside(path: str, others: Iterable[str]) -> bool:
    """Returns whether a path is one of others, or inside of one."""
    return any(
        path == other or path.startswith((f"{other}.", f"{other}[")) for other in others
    )


class _NestedChanges:
    """Finds values that change repeatedly."""

    def __init__(self) -> None:
        self._summaries: dict[str, Any] = {}
        self._tensors: dict[str, weakref.ref[Tensor]] = {}
        self._initial: set[str] = set()
        self._counts: Counter[str] = Counter()
        # Results of the forward that the backward reads.
        self._results: set[str] = set()

    def start(self, values: Iterable[tuple[str, Any]]) -> None:
        """Reads the values before the training."""
        self.update(values)
        self._initial = {*self._summaries}

    def update(self, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Returns those of the current values that are probably state."""
        changed = {}
        for path, value in values:
            if _has_graph(value):
                self._results.add(path)
            summary = None if path in self._results else _summary(value)
            if summary is None:
                continue
            previous = self._summaries.get(path)
            if previous is not None and previous != summary:
                self._counts[path] += 1
                if self._is_state(path, value):
                    changed[path] = value
            self._summaries[path] = summary
            if isinstance(value, Tensor):
                self._tensors[path] = weakref.ref(value)
        return changed

    def _is_state(self, path: str, value: Any) -> bool:
        if path in self._initial:
            is_integer = isinstance(value, int)
            least = _REPETITIONS_OF_INTEGER if is_integer else _REPETITIONS
            return isinstance(value, bool) or self._counts[path] >= least
        tensor = self._tensors.get(path)
        return tensor is not None and tensor() is value


def _has_graph(value: Any) -> bool:
    """Returns whether a value is, or contains, a result with a graph, which no later update can
    use.
    """
    if isinstance(value, Tensor):
        return value.grad_fn is not None and not value.is_leaf
    if type(value) in (list, tuple, deque):
        return any(map(_has_graph, value))
    return False


def _unsaved_of(
    owner: Any, changed: Mapping[str, Any], reported: Collection[str]
) -> dict[str, Any]:
    """Returns the unsaved ones of changed values that are not inside of a reported one."""
    candidates = {
        path: value for path, value in changed.items() if not _is_inside(path, reported)
    }
    return {path: candidates[path] for path in _unsaved(owner, candidates)}


def _unsaved(owner: Any, changed: Mapping[str, Any]) -> Iterator[str]:
    """Yields the paths of those changed values that the owner's state does not contain.

    Where a plugin has a ``state_dict`` of its own, only modules are looked for in it.
    """
    if not changed:
        return
    saved = _tensors_of(owner.state_dict())
    addresses = {tensor.data_ptr() for tensor in saved}
    is_plain = _is_plain(owner)
    for path, value in changed.items():
        if not (is_plain or isinstance(value, nn.Module)):
            continue
        held = _tensors_of(value)
        # A state may also have copies; a number equals that of steps in an optimizer's state.
        missing = [tensor for tensor in held if tensor.data_ptr() not in addresses]
        if not held or not all(
            any(_is_equal(tensor, copy) for copy in saved)
            and not (is_plain and tensor.numel() == 1)
            for tensor in missing
        ):
            yield path


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
        # NaN differs from itself.
        return repr(value) if isinstance(value, float | complex) else value
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
        last = [*value][-ITEMS:]
        return len(value), [_summary(item) for item in last]
    return None


def _sum(tensor: Tensor, elements: int) -> float:
    step = max(1, tensor.numel() // elements)
    sample = real_numbers(tensor.detach()).reshape(-1)[::step]
    return sample.double().nan_to_num().sum().item()
