"""Means of integers, which two subjects may count otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from runner.proof.isolation import Frame, Location

_SUM = ".sum"
_COUNT = ".count"


def counted_more_often(baseline: Frame, changed: Frame) -> Iterator[Location]:
    """Yields the sums and counts of means of integers that are the same multiple of the baseline's.

    A learner that logs ``Mean(flag, 1)`` counts one for each batch, and one for each part of it.
    Fewer counts are never the same: a stage that leaves out samples has the same mean if all
    remaining answers are right.
    """
    for location in baseline:
        if location.kind != "output" or not location.name.endswith(_COUNT):
            continue
        total = location._replace(name=location.name.removesuffix(_COUNT) + _SUM)
        numbers = [
            _integer(frame.get(leaf))
            for frame in (baseline, changed)
            for leaf in (total, location)
        ]
        if _is_multiple(*numbers):
            yield from (total, location)


def _integer(value: Any) -> int | None:
    """Returns an integer or the only element of a tensor of integers; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int) else None


def _is_multiple(
    baseline_sum: int | None,
    baseline_count: int | None,
    changed_sum: int | None,
    changed_count: int | None,
) -> bool:
    """Returns whether a sum and its count are the baseline's, counted several times."""
    if baseline_sum is None or changed_sum is None:
        return False
    if not baseline_count or changed_count is None:
        return False
    times, remainder = divmod(changed_count, baseline_count)
    return times > 1 and not remainder and changed_sum == times * baseline_sum
