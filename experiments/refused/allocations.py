"""Bytes that are allocated at once."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def largest_allocation(function: Callable[[], object]) -> int:
    """Returns the largest sum of bytes that a function has allocated and not yet freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    allocated = 0
    largest = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            largest = max(largest, allocated)
    return largest
