"""A function of tensors that is captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runner.api import UsageError, map_tensors, tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNCAPTURED_CALLS = 3
"""Calls that run without a graph before one is captured: libraries start, and state is made."""
MOST_GRAPHS = 8
"""Graphs of one function. Each reserves memory; more would be captured for shapes that vary."""
Function = Callable[..., Any]


class CapturedCall:
    """A function whose calls are replayed by a CUDA graph.

    Arguments that are trees of tensors are copied to the places that the graph reads, and results
    from the places that it writes. Other arguments are constants; every combination of constants
    and shapes has a separate graph. The first calls run as usual, so that nothing has to be undone:
    a capture itself computes nothing.
    """

    def __init__(self, name: str, function: Function, generators: Collection[torch.Generator]) -> None:
        """Captures nothing yet.

        Args:
            name: Of the function, for messages.
            function: Changes nothing but tensors that stay where they are.
            generators: From which the function draws.
        """
        self._name = name
        self._function = function
        self._generators = generators
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: dict[Hashable, int] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function or replays its graph.

        Raises:
            UsageError: Shapes or constants differ too often.
        """
        signature = tuple(map(_signature, arguments))
        graph = self._graphs.get(signature)
        if graph is None:
            calls = self._calls.get(signature, 0)
            if calls < UNCAPTURED_CALLS:
                self._calls[signature] = calls + 1
                return self._function(*arguments)
            if len(self._graphs) == MOST_GRAPHS:
                raise UsageError(
                    f"cuda_graph: {self._name} has been called with more than {MOST_GRAPHS} combinations of "
                    "shapes; use scope: update"
                )
            graph = self._graphs[signature] = _Graph(self._function, arguments, self._generators)
        return graph(arguments)

    def forget(self) -> None:
        """Discards all graphs, which read and write the tensors from before."""
        self._graphs.clear()
        self._calls.clear()


class _Graph:
    """A graph with the places of its arguments and results."""

    def __init__(self, function: Function, arguments: Sequence[Any], generators: Collection[torch.Generator]) -> None:
        captured = copied(list(arguments))
        self._places = list(tensors(captured))
        self._replay, self._result = capture(lambda: function(*captured), generators)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        copy_all(self._places, list(tensors(list(arguments))))
        self._replay()
        return copied(self._result)


def capture(function: Callable[[], Any], generators: Collection[torch.Generator]) -> tuple[Callable[[], None], Any]:
    """Captures a function; returns what replays it, and the tree of tensors that a replay fills."""
    import torch

    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


@contextmanager
def side_stream() -> Iterator[None]:
    """Runs warm-up calls on another stream, as a capture requires of updates with gradients."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def copied(tree: Any) -> Any:
    """Returns copies of all tensors in a tree."""
    import torch

    fresh = map_tensors(torch.empty_like, tree)
    copy_all(list(tensors(fresh)), list(tensors(tree)))
    return fresh


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies tensors to places of the same shapes and types, with one launch for each type."""
    import torch

    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        of_type = pairs.setdefault(place.dtype, ([], []))
        of_type[0].append(place)
        of_type[1].append(value)
    with torch.no_grad():
        for places_of_type, values_of_type in pairs.values():
            torch._foreach_copy_(places_of_type, values_of_type)


def _signature(argument: Any) -> Hashable:
    """Returns what has to be the same for the same graph."""
    if not isinstance(argument, dict | list | tuple) and not hasattr(argument, "dtype"):
        constant: Hashable = argument
        return constant
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(argument))
