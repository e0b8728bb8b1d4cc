"""Intervals of time during which a study was worked on."""

from collections.abc import Sequence

# Start and end in seconds since 1970.
Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total = 0.0
    covered_until = float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total
