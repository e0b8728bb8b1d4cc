"""Bytes that the processes of one machine exchange: computed from their operations, and counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from runner.system.tensor_trees import nbytes

RESULT = -1
"""Place of the result of an operation among its tensors."""


class RingBytes(NamedTuple):
    """Describes an operation in a ring of p processes, which send ``factor`` (p - 1) n bytes.

    Attributes:
        factor: The factor.
        tensor: Place of the tensors with n bytes: the number of an argument, or ``RESULT``.
    """

    factor: int
    tensor: int


RULES = {
    "allreduce_": RingBytes(2, 0),
    "allreduce_coalesced_": RingBytes(2, 0),
    "broadcast_": RingBytes(1, 0),
    "reduce_": RingBytes(1, 0),
    "allgather_": RingBytes(1, 0),
    "_allgather_base_": RingBytes(1, 0),
    "_reduce_scatter_base_": RingBytes(1, 1),
    "all_reduce": RingBytes(2, 0),
    "all_reduce_": RingBytes(2, 0),
    "broadcast": RingBytes(1, 0),
    "all_gather_into_tensor": RingBytes(1, RESULT),
    "reduce_scatter_tensor": RingBytes(1, 0),
}
"""By operation of torch. No other algorithm sends less (Patarasuk and Yuan 2009, J. Parallel
Distrib. Comput. 69).
"""
_NAMESPACES = ("c10d", "_c10d_functional")
_SILENT = frozenset({"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"})
"""Operations that send no tensors."""


_FUNCTIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
"""Functions of ``torch.distributed`` that callbacks of its hooks call."""


class SentBytes:
    """Bytes of the operations of an update, computed for all processes.

    Attributes:
        sent: Bytes that all processes together send, by operation.
        unknown: Operations without a rule.

    Args:
        count: Number of processes; all of them take part in every operation.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: Counter[str] = Counter()
        self.unknown: set[str] = set()
        self._lock = threading.Lock()

    def add(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        """Adds what an operation sends."""
        rule = RULES.get(name)
        with self._lock:
            if rule is not None:
                tree = result if rule.tensor == RESULT else arguments[rule.tensor]
                self.sent[name] += rule.factor * (self.count - 1) * nbytes(tree)
            elif name not in _SILENT:
                self.unknown.add(name)


@contextmanager
def computed_traffic(count: int) -> Iterator[SentBytes]:
    """Yields what operations of this process send inside the ``with``.

    Args:
        count: Number of processes.
    """
    traffic = SentBytes(count)
    with ExitStack() as stack:
        # A hook of torch continues in another thread, where the mode of this one has no effect.
        for name in _FUNCTIONS:
            function = getattr(dist, name)
            stack.enter_context(patch.object(dist, name, _counted(function, traffic)))
        stack.enter_context(_Operations(traffic))
        yield traffic


def _counted(function: Callable[..., Any], traffic: SentBytes) -> Callable[..., Any]:
    """Returns a function whose operations are counted in threads other than this one."""
    thread = threading.get_ident()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return function(*args, **kwargs)
        with _Operations(traffic):
            return function(*args, **kwargs)

    return call


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Reports the operations of a thread."""

    def __init__(self, traffic: SentBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls an operation, and adds what it sends."""
        # An operation on divided tensors leads to others, which come here, too.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._traffic.add(func.overloadpacket.__name__, args, result)
        return result


def received_bytes() -> int | None:
    """Returns the bytes that the loopback interface has received since the machine started.

    Returns:
        None if the machine does not count them.
    """
    counters = psutil.net_io_counters(pernic=True)
    loopback = [counter.bytes_recv for name, counter in counters.items() if name.startswith("lo")]
    return sum(loopback) if loopback else None
