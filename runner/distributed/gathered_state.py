"""States of all processes in the first one, which writes their checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.plugin.ring import Ring
from runner.plugin.source import State
from runner.system.tensor_trees import map_leaves

if TYPE_CHECKING:
    from torch import Tensor

    from runner.distributed.process_group import ProcessGroup


class RingReference(NamedTuple):
    """A ring of another process.

    Attributes:
        number: Its number among the rings of the state, in order.
        capacity: Its capacity.
        written: Rows ever written.
    """

    number: int
    capacity: int
    written: int


class _Request(NamedTuple):
    """Rows of a ring that the first process needs."""

    rank: int
    number: int
    first: int
    last: int


@contextmanager
def gathered_states(group: ProcessGroup) -> Iterator[list[State]]:
    """Yields the states of the other processes, by rank, in the first one.

    Their rings are read from these processes when rows are needed: a writer needs few rows, and
    all of them may not fit into one memory. The others call ``send_state`` meanwhile.
    """
    states: list[Any] = group.gather_first(None)[1:]
    yield [_with_rings(group, rank, other) for rank, other in enumerate(states, 1)]
    group.broadcast(None)


def send_state(group: ProcessGroup, state: State) -> None:
    """Sends the state of a process that is not the first, and rows of its rings as requested."""
    rings: list[Ring] = []

    def refer(ring: Ring) -> RingReference:
        rings.append(ring)
        return RingReference(len(rings) - 1, ring.capacity, ring.written)

    group.gather_first(map_leaves(refer, state, (Ring,)))
    while (request := group.broadcast()) is not None:
        rows = None
        if request.rank == group.rank:
            rows = rings[request.number].read(request.first, request.last).cpu()
        group.broadcast(rows, request.rank)


def _with_rings(group: ProcessGroup, rank: int, state: State) -> State:
    """Returns a state of another process with rings that are read from there."""

    def ring_of(reference: RingReference) -> Ring:
        def read(first: int, last: int) -> Tensor:
            group.broadcast(_Request(rank, reference.number, first, last))
            rows: Tensor = group.broadcast(None, rank)
            return rows

        return Ring(reference.capacity, reference.written, read)

    restored: State = map_leaves(ring_of, state, (RingReference,))
    return restored
