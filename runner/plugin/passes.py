"""Passes over a stream of batches, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from runner.plugin.source import Batch
from runner.system.errors import UsageError


def endless_batches(
    open_pass: Callable[[int, int], Iterator[Batch]],
    size: int,
    kind: str,
    expected: int | None,
    length: int | None,
) -> Iterator[Batch]:
    """Yields the batches of a stream that is read again and again.

    Args:
        open_pass: Returns the batches of a pass; it takes the number of its first batch, and its
            own number.
        size: Samples of a batch.
        kind: Kind of the source, for messages.
        expected: Samples that every pass should have; None if that does not matter.
        length: The length that the stream reports, for messages.

    Raises:
        UsageError: A pass has no batch, or other samples than expected.
    """
    number = 0
    for epoch in itertools.count():
        first = number
        for batch in open_pass(first, epoch):
            number += 1
            count = number - first
            if expected is not None and count * size > expected:
                raise _wrong_length(
                    kind, epoch, f"at least {count:,} batches of {size:,}", length
                )
            yield batch
        count = number - first
        if not count:
            raise UsageError(_empty_pass(kind, epoch, size))
        if expected is not None and count * size < expected:
            raise _wrong_length(kind, epoch, f"{count:,} batches of {size:,}", length)


def _wrong_length(
    kind: str, epoch: int, delivered: str, length: int | None
) -> UsageError:
    """Returns the error about a pass with other samples than the stream's length."""
    return UsageError(
        f"train.epochs: '{kind}': the stream delivered {delivered} in epoch {epoch + 1}, and its "
        f"__len__ is {length:,}; correct it, or use train.updates"
    )


def _empty_pass(kind: str, epoch: int, size: int) -> str:
    """Returns the message about a pass without a batch."""
    if not epoch:
        return f"data: '{kind}' has not a single batch of {size:,} samples"
    problem = f"the stream of '{kind}' delivered no batch in pass {epoch + 1}"
    hint = "return a new iterator from __iter__, or train for fewer updates"
    return f"data: {problem}, so it may be one that can be read only once: {hint}"
