"""State that blocks of a model read, for a second computation that starts as the first one did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import Tensor, nn

from runner.api import HostGeneratorStates, RunnerError, tensors

if TYPE_CHECKING:
    Buffers = dict[nn.Module, dict[str, Tensor | None]]
    Containers = list[tuple[str, Any, Any]]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_STATE = frozenset({"builtins", "functools", "numpy", "torch"})
"""Packages whose objects are not examined."""
_DEEPEST = 4
_MOST_CONTAINERS = 1000


class FirstForward(AbstractContextManager[None]):
    """The first computation of blocks, inside the ``with``."""

    def __init__(self, start: StartState) -> None:
        self._start = start

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._start.finish_first_forward()


class StartState(AbstractContextManager[None]):
    """Buffers, attributes and random generators of blocks at the start of a forward.

    Inside the ``with``, the blocks compute from this state, and their changes to it are discarded.
    A graph that is kept for several backward passes enters it several times.

    Args:
        blocks: The blocks that the forward computes.
        inputs: Their inputs, except the tensors whose versions torch compares.
        generators: Generators in attributes of the blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], inputs: Any, generators: Sequence[Any]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self._blocks = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        self._buffers: Buffers = {module: module._buffers for module in modules}
        self._start_buffers = _copies(self._buffers)
        self._containers = list(_containers(modules))
        self._inputs = [(tensor, _version(tensor)) for tensor in tensors(inputs)]
        self._attributes = [
            (f"{owner}.{name}", tensor, _version(tensor))
            for owner, _, content in self._containers
            for name, tensor in _items(content)
            if isinstance(tensor, Tensor)
        ]
        self._generators = HostGeneratorStates(generators)
        self._outer_generators: HostGeneratorStates | None = None
        self._outer_buffers: Buffers = {}
        self._outer_containers: Containers = []

    def finish_first_forward(self) -> None:
        """Raises a RunnerError if the forward writes to a tensor in an attribute."""
        for name, tensor, version in self._attributes:
            if _version(tensor) != version:
                _refuse(f"the forward of a block writes to {name} in place, which would be written twice")

    def __enter__(self) -> None:
        for tensor, version in self._inputs:
            if _version(tensor) != version:
                _refuse(f"an input of {self._blocks} was written in place before the backward pass", "pass a copy")
        for name, tensor, version in self._attributes:
            if _version(tensor) != version:
                _refuse(f"{name} was written in place before the backward pass")

        self._outer_buffers = {module: dict(module._buffers) for module in self._buffers}
        # Blocks write to copies, because the graph may be computed once more.
        _assign(_copies(self._start_buffers))
        self._outer_containers = [(name, container, _content(container)) for name, container, _ in self._containers]
        _fill(self._containers)
        self._outer_generators = HostGeneratorStates(self._generators.generators)
        self._generators.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer_generators is not None:
            self._outer_generators.restore()
        # The current buffers themselves are assigned, which must keep the same memory.
        _assign(self._outer_buffers)
        _fill(self._outer_containers)
        self._outer_buffers = {}
        self._outer_containers = []
        self._outer_generators = None


def _refuse(problem: str, hint: str = "assign a new tensor, or make it a buffer (register_buffer)") -> NoReturn:
    raise RunnerError(f"activation_checkpointing: {problem}; {hint}, or switch the stage off")


def _version(tensor: Tensor) -> int:
    """Returns the number of times that a tensor was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def _copies(buffers: Buffers) -> Buffers:
    """Returns copies of buffers; one that several modules share stays shared."""
    originals = {id(tensor): tensor for named in buffers.values() for tensor in named.values()}
    copies = {key: None if tensor is None else tensor.clone() for key, tensor in originals.items()}
    return {module: {name: copies[id(tensor)] for name, tensor in named.items()} for module, named in buffers.items()}


def _assign(buffers: Buffers) -> None:
    for module, named in buffers.items():
        module._buffers.clear()
        module._buffers.update(named)


def _containers(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the attributes of modules, and the containers and objects in them, which may change.

    Yields:
        A name for messages, the container itself, and its content at this moment. Tensors of the
        content belong to no graph, because they would keep those of all earlier updates.
    """
    visited: set[int] = set()
    pending: list[tuple[str, Any, int]] = [(type(module).__name__, vars(module), 0) for module in modules]
    while pending and len(visited) < _MOST_CONTAINERS:
        owner, container, depth = pending.pop()
        if id(container) in visited:
            continue
        visited.add(id(container))
        yield owner, container, _content(container, without_graph=True)
        if depth == _DEEPEST:
            continue
        for name, value in _items(container):
            is_of_every_module = depth == 0 and name in _OF_EVERY_MODULE
            nested = None if is_of_every_module else _container(value)
            if nested is not None:
                pending.append((f"{owner}.{name}", nested, depth + 1))


def _container(value: Any) -> Any:
    """Returns what can change in a value: the value itself, or its attributes; None for anything else."""
    if isinstance(value, dict | list | deque | set | np.ndarray):
        return value
    if isinstance(value, Tensor | nn.Module):
        return None
    if type(value).__module__.partition(".")[0] in _WITHOUT_STATE:
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(content, np.ndarray):
        return ()
    return list(content.items()) if isinstance(content, dict) else list(enumerate(content))


def _content(container: Any, without_graph: bool = False) -> Any:
    """Returns a shallow copy of a container."""
    if isinstance(container, np.ndarray):
        return container.copy()
    if isinstance(container, dict):
        if not without_graph:
            return dict(container)
        return {name: _without_graph(value) for name, value in container.items()}
    return [_without_graph(value) for value in container] if without_graph else list(container)


def _without_graph(value: Any) -> Any:
    """Returns a tensor of the same memory that is in no graph, and for which torch saves as much."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _fill(containers: Containers) -> None:
    """Gives containers their content, if they have another one."""
    for _, container, content in containers:
        if _has_content(container, content):
            continue
        if isinstance(container, np.ndarray):
            container[...] = content
            continue
        container.clear()
        if isinstance(container, dict | set):
            container.update(content)
        else:
            container.extend(content)


def _has_content(container: Any, content: Any) -> bool:
    if isinstance(container, np.ndarray):
        return np.array_equal(container, content)
    if len(container) != len(content):
        return False
    if isinstance(content, Mapping):
        return all(name in container and container[name] is value for name, value in content.items())
    return all(value is content_value for value, content_value in zip(container, content, strict=True))
