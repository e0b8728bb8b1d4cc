"""Interpolated n-grams with modified Kneser-Ney discounts (Chen and Goodman 1998, TR-10-98)."""

from typing import NamedTuple

import numpy as np

DISCOUNTS = 3
"""Counts of 1, of 2, and of 3 or more have separate discounts."""


class Level(NamedTuple):
    """Counts of one order.

    Attributes:
        grams: Keys of the n-grams that occur, in ascending order.
        counts: Their counts; of lower orders, the number of different symbols before them.
        contexts: Keys of the contexts that occur, in ascending order.
        totals: The sum of the counts of every context.
        reserved: The probability of every context that its discounts leave for the lower order.
        discounts: Discounts of counts of 0, 1, 2 and 3 or more.
    """

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    reserved: np.ndarray
    discounts: np.ndarray


class KneserNey:
    """Probabilities of symbols after their contexts.

    Args:
        windows: Training data: rows of ``order - 1`` symbols of context and the one after them.
        symbols: Number of different symbols that can be predicted.
        base: Number of different symbols including those that occur in contexts alone.
    """

    def __init__(self, windows, symbols, base=None):
        self.symbols = symbols
        self.base = base or symbols
        self.order = windows.shape[1]
        if self.base**self.order >= 2**63:
            raise ValueError(f"{self.order}-grams of {self.base} symbols do not fit into 64 bits")
        keys, counts = np.unique(self._keys(windows), return_counts=True)
        levels = [self._level(keys, counts)]
        for length in range(self.order - 1, 0, -1):
            # A lower order counts in how many contexts a gram occurs, not how often.
            keys, counts = np.unique(keys % self.base**length, return_counts=True)
            levels.append(self._level(keys, counts))
        self.levels = levels[::-1]

    def probabilities(self, windows):
        """Returns the probability of the last symbol of every row."""
        probability = np.full(len(windows), 1 / self.symbols)
        for length, level in enumerate(self.levels, 1):
            keys = self._keys(windows[:, -length:])
            counts = _lookup(level.grams, level.counts, keys)
            totals = _lookup(level.contexts, level.totals, keys // self.base)
            reserved = _lookup(level.contexts, level.reserved, keys // self.base)
            is_known = totals > 0
            kept = np.maximum(counts - level.discounts[np.minimum(counts, DISCOUNTS)], 0)
            interpolated = kept / np.maximum(totals, 1) + reserved * probability
            probability = np.where(is_known, interpolated, probability)
        return probability

    def _keys(self, windows):
        powers = self.base ** np.arange(windows.shape[1] - 1, -1, -1, dtype=np.int64)
        return windows.astype(np.int64) @ powers

    def _level(self, grams, counts):
        frequency = [np.count_nonzero(counts == count) for count in range(1, DISCOUNTS + 2)]
        discounts = np.zeros(DISCOUNTS + 1)
        ratio = frequency[0] / max(1, frequency[0] + 2 * frequency[1])
        for count in range(1, DISCOUNTS + 1):
            following = frequency[count] / max(1, frequency[count - 1])
            discounts[count] = max(0.0, count - (count + 1) * ratio * following)
        contexts, starts = np.unique(grams // self.base, return_index=True)
        totals = np.add.reduceat(counts, starts)
        removed = discounts[np.minimum(counts, DISCOUNTS)]
        reserved = np.add.reduceat(removed, starts) / totals
        return Level(grams, counts, contexts, totals, reserved, discounts)


def _lookup(keys, values, wanted):
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[position] == wanted, values[position], 0)


def windows_of(sequence, order, start=0):
    """Returns a row for every symbol from ``start`` on: the ``order - 1`` before it, and itself."""
    first = start - order + 1
    return np.lib.stride_tricks.sliding_window_view(sequence[first:], order)
