"""Checks that measured time is the time of the work: clocks that are intact, and work that is
finished.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from runner.proof.subject import Subject
from runner.system.stopwatch import Stopwatch
from runner.system.tensor_trees import tensors

MOST_READ = 32
"""Tensors of a state that are read after a timed block."""
LEAST_DEFERRED = 0.05
"""Share of a block's time from which on the time of reading results counts as well."""


class Timekeepers:
    """The functions by which time is measured, as they are when it is made.

    Attributes:
        fault: A message about functions that were replaced; empty if there are none.
    """

    def __init__(self) -> None:
        self._functions = [(time, "perf_counter")]
        if torch.cuda.is_available():
            self._functions += [(torch.cuda, "synchronize"), (torch.cuda, "Event")]
        self._originals = [getattr(owner, name) for owner, name in self._functions]
        self.fault = ""

    def check(self) -> None:
        """Notes functions that have been replaced, and puts them back."""
        pairs = zip(self._functions, self._originals, strict=True)
        for (owner, name), original in pairs:
            if getattr(owner, name) is not original:
                function = f"{owner.__name__}.{name}"
                self.fault = f"'{function}', by which time is measured, was replaced"
                # Later blocks are timed by the original.
                setattr(owner, name, original)


def deferred_seconds(stopwatch: Stopwatch, subject: Subject, output: Any) -> float:
    """Returns the time that the first reading of a state and an output takes longer than the
    second one.

    Work that a step leaves to a thread or a queue, or does when a result is read, is done in the
    first.
    """
    read = partial(read_results, subject, output)
    first = stopwatch.seconds(read)
    second = stopwatch.seconds(read)
    return max(0.0, first - second)


def read_results(subject: Subject, output: Any = None) -> None:
    """Reads a state and an output, so that no work remains."""
    state = [
        tensor
        for stateful in subject.state.values()
        for tensor in tensors(stateful.state_dict())
    ]
    step = max(1, len(state) // MOST_READ)
    for tensor in (*tensors(output), *state[::step]):
        if tensor.layout == torch.strided and tensor.numel():
            # One element is enough: it can be read only when its tensor is computed.
            first_element = (0,) * tensor.dim()
            tensor.detach()[first_element].item()
