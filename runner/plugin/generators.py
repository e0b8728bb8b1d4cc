"""Generators of random numbers on the host: the global ones, and those in attributes."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.plugin.attributes import attributes_of, has_parts
from runner.plugin.context import derived_seed
from runner.plugin.source import UNSENT, Source

_GLOBAL: tuple[Any, ...] = (
    # The methods of one object, which typeshed calls functions.
    random.getstate.__self__,  # type: ignore[attr-defined]
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    torch.default_generator,
)
_DEEPEST = 16
_LARGEST_CONTAINER = 1000
"""Longer lists hold samples."""
_UP_TO_TOO_MANY = slice(_LARGEST_CONTAINER + 1)
_MOST_OBJECTS = 20_000


@contextmanager
def seeded(
    seed: int,
    device: torch.device | None = None,
    generators: Sequence[Any] = (),
) -> Iterator[None]:
    """Seeds generators inside the ``with`` and restores them afterwards.

    Args:
        seed: For the global generators of Python, NumPy and torch.
        device: A GPU whose generator is seeded, too; without one, torch's is seeded on the host
            alone.
        generators: Others that are seeded, each in another way.
    """
    torch_generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch_generators.append(torch.cuda.default_generators[device.index or 0])
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_states = [generator.get_state() for generator in torch_generators]
    states = [_state_of(generator) for generator in generators]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in torch_generators:
        generator.manual_seed(seed)
    for number, generator in enumerate(generators):
        _seed(generator, derived_seed(seed, f"generator/{number}"))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(torch_generators, torch_states, strict=True):
            generator.set_state(state)


@dataclass
class HostGeneratorStates:
    """States of the global generators of Python, NumPy and torch, and of others on the host."""

    generators: Sequence[Any] = ()
    python: Any = field(default_factory=random.getstate, init=False)
    numpy: Any = field(default_factory=np.random.get_state, init=False)
    torch: Tensor = field(default_factory=torch.get_rng_state, init=False)
    further: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.further = [_state_of(generator) for generator in self.generators]

    def have_changed(self) -> bool:
        """Returns whether one of the generators was used since."""
        if not torch.equal(self.torch, torch.get_rng_state()):
            return True
        if self.python != random.getstate():
            return True
        present = [np.random.get_state(), *map(_state_of, self.generators)]
        return not _same_state([self.numpy, *self.further], present)

    def restore(self) -> None:
        """Sets the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        for generator, state in zip(self.generators, self.further, strict=True):
            _set_state(generator, state)


def find_generators(*owners: Any) -> list[Any]:
    """Returns the generators that objects own, each once and always in the same order.

    A generator may be an attribute of an owner or of what it contains, be in a closure, or belong
    to a class of these objects or to the module of a class. The global generators and those of an
    accelerator are left out.
    """
    generators: list[Any] = []
    visited: dict[int, Any] = {}
    # The last one is examined next, so that what an object contains follows it.
    pending = [(owner, 0) for owner in reversed(owners)]
    while pending and len(visited) < _MOST_OBJECTS:
        value, depth = pending.pop()
        is_class = isinstance(value, type)
        if id(value) in visited or not (is_class or has_parts(value)):
            continue
        # The reference keeps another object from getting this identity.
        visited[id(value)] = value
        if _is_generator(value):
            generators.append(value)
        elif depth < _DEEPEST:
            parts = _of_class(value) if is_class else _parts(value)
            pending += [(child, depth + 1) for child in reversed(list(parts))]
    return generators


def _parts(value: Any) -> Iterable[Any]:
    """Returns the objects in which generators of an object may be."""
    contained: Collection[Any] = ()
    # The methods of the built-in types, because a subclass may override them.
    if isinstance(value, dict):
        contained = dict.values(value)
    elif isinstance(value, list):
        contained = list.__getitem__(value, _UP_TO_TOO_MANY)
    elif isinstance(value, tuple):
        contained = tuple.__getitem__(value, _UP_TO_TOO_MANY)
    elif isinstance(value, FunctionType):
        return _of_function(value)
    if len(contained) > _LARGEST_CONTAINER:
        contained = ()
    attributes = attributes_of(value)
    if isinstance(value, Source):
        attributes = {
            name: part for name, part in attributes.items() if name not in UNSENT
        }
    return (*contained, *attributes.values(), type(value))


def _of_function(function: FunctionType) -> Iterable[Any]:
    """Returns what a function refers to: closure, defaults, and the generators of its module."""
    contents = []
    for cell in function.__closure__ or ():
        # A variable that is not assigned yet has no content.
        with suppress(ValueError):
            contents.append(cell.cell_contents)
    defaults = function.__defaults__ or ()
    keyword_defaults = function.__kwdefaults__ or {}
    in_module = _generators_in(function.__globals__)
    return (*contents, *defaults, *keyword_defaults.values(), *in_module)


def _of_class(cls: type[Any]) -> Iterable[Any]:
    """Returns the generators of a class and of its module, and its bases."""
    module = sys.modules.get(cls.__module__)
    in_module = () if module is None else _generators_in(vars(module))
    return (*_generators_in(vars(cls)), *in_module, *cls.__bases__)


def _generators_in(namespace: Mapping[str, Any]) -> list[Any]:
    return [value for value in list(namespace.values()) if _is_generator(value)]


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        is_on_host = value.device.type == "cpu"
        return is_on_host and value is not torch.default_generator
    # The operating system's generator has neither a seed nor a state.
    if isinstance(value, random.SystemRandom):
        return False
    kinds = np.random.Generator | np.random.RandomState | random.Random
    return isinstance(value, kinds) and not any(
        value is generator for generator in _GLOBAL
    )


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        bits = type(generator._bit_generator)(seed)
        generator.set_state(np.random.RandomState(bits).get_state(legacy=False))
    else:
        generator.seed(seed)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _same_state(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return _same_state(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return all(map(_same_state, left, right))
    if isinstance(left, np.ndarray | Tensor):
        return bool(np.array_equal(left, right))
    return bool(left == right)
