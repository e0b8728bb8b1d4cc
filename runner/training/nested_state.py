"""Values inside the objects of a training that updates may change: attributes of submodules, of
objects of plugins and of optimizers, and globals of plugin files.
"""

from __future__ import annotations

from abc import ABCMeta
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import isfunction
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.plugin.learner import Learner
from runner.plugin.source import Source

ITEMS = 64
"""Items of a container that are read: the last ones."""
_DEPTH = 3
"""Objects inside one another that are read."""
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
# Nearly all values are of these types, which have no attributes.
_NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_WITHOUT_STATE = frozenset({FunctionType, ModuleType, type, ABCMeta})
_MODULE_NAMES = frozenset(vars(nn.Module()))
"""Attributes of every module, which are in its state, or no state."""
_OPTIMIZER_NAMES = frozenset(
    {*vars(SGD([nn.Parameter(torch.zeros(()))], lr=1.0)), "step", "_opt_called"}
)
"""Attributes of every optimizer, with those that a schedule of torch adds."""
_STATEFUL = (LRScheduler, GradScaler)
"""Classes of torch whose attributes are state of the learner that makes such an object."""
_STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""A module with one of these methods of its own keeps its state itself."""


def nested_values(
    owner: Any,
    modules: Collection[ModuleType],
    is_of_plugin: Callable[[type], bool],
    generators: Collection[int],
    skipped: Collection[str],
) -> Iterator[tuple[str, Any]]:
    """Yields values inside the attributes of a learner or source, with their paths.

    No method or property of the objects is called.

    Args:
        owner: The learner, or the source.
        modules: The plugin files of the training.
        is_of_plugin: Returns whether a class is one of a plugin.
        generators: The ids of objects that are kept anyway.
        skipped: Attributes of the owner that are no state.
    """
    walk = _Walk(generators, is_of_plugin)
    name = type(owner).__name__
    if isinstance(owner, Learner):
        yield from _module_values(owner, walk)
        yield from _optimizer_values(owner, walk)
        yield from _global_values(modules, walk)
    walk.seen.add(id(owner))
    if is_dataset(owner):
        yield from _dataset_values(owner, walk)
        return
    for attribute, value in [*vars(owner).items()]:
        if attribute not in skipped:
            # The attribute itself is compared as a whole.
            yield from walk.inside(f"{name}.{attribute}", value, _DEPTH)


def _module_values(learner: Learner, walk: _Walk) -> Iterator[tuple[str, Any]]:
    """Yields buffers that are not persistent, and attributes of modules that are not of torch."""
    attributes = {id(value): name for name, value in vars(learner).items()}
    for role, root in learner.modules().items():
        name = attributes.get(id(root), role)
        root_path = f"{type(learner).__name__}.{name}"
        for path, module in root.named_modules():
            if id(module) in walk.seen:
                continue
            walk.seen.add(id(module))
            if any(
                getattr(type(module), method) is not getattr(nn.Module, method)
                for method in _STATE_METHODS
            ):
                continue
            prefix = f"{root_path}.{path}" if path else root_path
            names = module._non_persistent_buffers_set
            buffers = {name: module._buffers.get(name) for name in sorted(names)}
            yield from walk.attributes(prefix, buffers, _DEPTH)
            if not _is_of_torch(module):
                own = _without(vars(module), _MODULE_NAMES)
                yield from walk.attributes(prefix, own, _DEPTH)


def _optimizer_values(learner: Learner, walk: _Walk) -> Iterator[tuple[str, Any]]:
    """Yields attributes of optimizers that are not of torch, and not in their states."""
    for _, optimizer in learner.optimizers():
        walk.seen.update((id(optimizer), id(vars(optimizer).get("state"))))
        has_own_state = type(optimizer).state_dict is not Optimizer.state_dict
        if has_own_state or _is_of_torch(optimizer):
            continue
        own = _without(vars(optimizer), _OPTIMIZER_NAMES)
        yield from walk.attributes(type(optimizer).__name__, own, _DEPTH)


def _global_values(
    modules: Collection[ModuleType], walk: _Walk
) -> Iterator[tuple[str, Any]]:
    for module in modules:
        name = Path(str(module.__file__)).stem
        private = [key for key in vars(module) if key.startswith("__")]
        yield from walk.attributes(name, _without(vars(module), private), _DEPTH)


def is_dataset(owner: Any) -> bool:
    """Returns whether a source draws from datasets (``DatasetSource``)."""
    return isinstance(owner, Source) and hasattr(type(owner), "datasets")


def _dataset_values(source: Source, walk: _Walk) -> Iterator[tuple[str, Any]]:
    """Yields attributes of a plugin's source, and those of its datasets; workers have copies of
    these, whose values are not seen.
    """
    name = type(source).__name__
    # The methods of the base classes name all attributes of these.
    names = {
        name
        for base in type(source).__mro__
        if base.__module__.startswith("runner.plugin.")
        for method in vars(base).values()
        if isfunction(method)
        for name in method.__code__.co_names
    }
    own = _without(vars(source), names)
    yield from walk.attributes(name, own, _DEPTH)
    # A stage may have replaced them by caches.
    replaced = vars(source)["_all_data"]
    parts = replaced or (vars(source)["train"], vars(source)["held_out"])
    for part, data in zip(("train", "held_out"), parts, strict=False):
        yield from walk.inside(f"{name}.{part}", data, _DEPTH)


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


class _Walk:
    """Yields the values of attributes, of objects of plugins, and of items of containers.

    Args:
        generators: The ids of objects that are left out.
        is_of_plugin: Returns whether a class is one of a plugin.
    """

    def __init__(
        self, generators: Collection[int], is_of_plugin: Callable[[type], bool]
    ) -> None:
        # Objects that contain one another are read once.
        self.seen = {*generators}
        self._is_of_plugin = is_of_plugin
        self._are_read: dict[type, bool] = {}

    def attributes(
        self, path: str, values: Mapping[str, Any], depth: int
    ) -> Iterator[tuple[str, Any]]:
        """Yields values of attributes, and those inside of them."""
        for name, value in values.items():
            yield from self._value(f"{path}.{name}", value, depth)

    def inside(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """Yields values inside of an object."""
        kind = type(value)
        if kind in _NUMBERS or kind in _WITHOUT_STATE or id(value) in self.seen:
            return
        if kind in _MAPPINGS:
            self.seen.add(id(value))
            for key in islice(reversed(value), ITEMS):
                # Text of other keys would call methods of theirs.
                if type(key) in (str, int):
                    yield from self._value(f"{path}[{key!r}]", value[key], depth)
        elif kind in _SEQUENCES:
            self.seen.add(id(value))
            start = max(0, len(value) - ITEMS)
            for number, item in enumerate(islice(value, start, None), start=start):
                yield from self.inside(f"{path}[{number}]", item, depth)
        elif issubclass(kind, Optimizer):
            yield from self._optimizer(path, value, depth)
        elif depth and self._is_read(kind) and hasattr(value, "__dict__"):
            self.seen.add(id(value))
            yield from self.attributes(path, dict(vars(value)), depth - 1)

    def _value(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if type(value) in _WITHOUT_STATE or id(value) in self.seen:
            return
        # Items of a mapping are compared one by one: a new one may be of a cache.
        if type(value) not in _MAPPINGS:
            yield path, value
        yield from self.inside(path, value, depth)

    def _optimizer(
        self, path: str, optimizer: Any, depth: int
    ) -> Iterator[tuple[str, Any]]:
        """Yields the state of an optimizer inside of another object, which may be of torch, and its
        attributes that are not of torch.
        """
        self.seen.add(id(optimizer))
        values = vars(optimizer)
        state = values.get("state")
        # An optimizer around another one may share its state.
        if isinstance(state, dict) and id(state) not in self.seen:
            self.seen.add(id(state))
            yield f"{path}.state", [*state.values()]
        if depth:
            added = _without(values, _OPTIMIZER_NAMES)
            yield from self.attributes(path, added, depth - 1)

    def _is_read(self, kind: type) -> bool:
        """Returns whether attributes of objects of this class may be state of a plugin."""
        if kind not in self._are_read:
            is_left_out = issubclass(kind, BaseModel | nn.Module | type | Learner)
            is_stateful = issubclass(kind, _STATEFUL) or self._is_of_plugin(kind)
            self._are_read[kind] = is_stateful and not is_left_out
        return self._are_read[kind]
