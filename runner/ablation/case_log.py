"""Measurements of one case, line by line, and the ratios that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from runner.proof.ratios import Ratio, of_processes
from runner.verify.variants import BASELINES

Entry = dict[str, Any]
"""A line: its ``case`` and ``variant``, and what was measured."""
Times = Callable[[Entry], Mapping[str, float]]
"""Returns the seconds by variant in the line of a round."""


@dataclass(frozen=True)
class CaseLog:
    """The lines about one case."""

    entries: Sequence[Entry]

    def values(self, key: str) -> list[Any]:
        """Returns the values of a key in all lines, in their order."""
        return [entry[key] for entry in self.entries if key in entry]

    def by_variant(self, key: str) -> dict[str, Any]:
        """Returns the last value of every variant under a key."""
        return {entry["variant"]: entry[key] for entry in self.entries if key in entry}

    @property
    def rounds(self) -> list[Entry]:
        """The lines of rounds; ``update`` has the seconds of one update by variant."""
        return [entry for entry in self.entries if "update" in entry]

    @property
    def failed(self) -> dict[str, str]:
        """Variants that have failed and were not started again since, with the reason."""
        latest = {
            entry["variant"]: entry.get("failed")
            for entry in self.entries
            if entry.keys() & {"failed", "prepared"}
        }
        return {
            name: str(reason) for name, reason in latest.items() if reason is not None
        }

    def ratios(
        self,
        name: str,
        others: Sequence[str] = BASELINES,
        of: Times = itemgetter("update"),
    ) -> dict[int, float]:
        """Returns baseline time / variant time by process: the median of the logarithm of that
        ratio over rounds, averaged over the baselines.

        The ratio to the mean of the baselines would be biased: where load comes in bursts, its
        median favours the variant.
        """
        ratios = {}
        for process, rounds in groupby(
            self._with({name, *others}, of), itemgetter("process")
        ):
            times = list(map(of, rounds))
            medians = (
                median(
                    math.log(seconds[reference] / seconds[name]) for seconds in times
                )
                for reference in others
            )
            ratios[process] = math.exp(fmean(medians))
        return ratios

    def ratio(
        self,
        name: str,
        others: Sequence[str] = BASELINES,
        of: Times = itemgetter("update"),
    ) -> Ratio | None:
        """Returns the ratio over all processes; None for a single process, whose
        luck cannot be estimated.
        """
        ratios = self.ratios(name, others, of)
        rounds = self._with({name, *others}, of)
        return (
            of_processes(list(ratios.values()), len(rounds))
            if len(ratios) > 1
            else None
        )

    def _with(self, names: set[str], of: Times) -> list[Entry]:
        return [entry for entry in self.rounds if names <= of(entry).keys()]
