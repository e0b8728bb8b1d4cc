"""How far single updates are from the same updates in float64, against how far the baseline's own are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.compare.error_norms import GRADIENTS, OUTPUTS, Errors, by_group, numbers, one_by_one
from runner.compare.float64 import NotFloat64Error, float64_build
from runner.compare.isolation import Frame, Isolation, Location, StepError
from runner.compare.state import clones, named_parameters, saved, to_float64
from runner.compare.subject import Build
from runner.compare.trajectory import failure, in_order, shared
from runner.compare.values import absolute_difference, as_float64
from runner.compare.verdict import Difference, Outcome, Verdict, plain
from runner.system.tree import map_tensors

CONTRACT = "Close"
ALLOWED = 2.0
"""How many times as far from the truth as the baseline, in the median."""
FEWEST_ULPS = {"output": 4, "gradient": 1, "state": 1}
"""Errors of fewer units in the last place are luck and count as that many; outputs can be few."""
FOREIGN, FOREIGN_AND_RANDOM = 0.1, 1e-3
"""From so large an error of the baseline on, its update in float64 is another one, rather than the same unrounded."""


@dataclass(frozen=True)
class Start:
    """A state of the baseline on its way, on the host, and the batch that came then."""

    update: int
    states: Mapping[str, Any]
    batch: Any


def rounding(baseline: Build, changed: Build, batches: Sequence[Any], states: int, seed: int) -> Verdict:
    """Takes single updates from states on the baseline's way, and compares how far each is from its float64 twin.

    Args:
        baseline: makes what to compare with.
        changed: makes what may round otherwise, but not more.
        batches: one for each update of the way.
        states: how many of the states to start from.
        seed: of the global random generators.

    Raises:
        StepError: the baseline itself fails.
    """
    starts = _starts(Isolation(baseline, seed), batches, states)
    try:
        single_updates = SingleUpdates(baseline, starts, seed)
    except NotFloat64Error as error:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, str(error))
    foreign = single_updates.foreign()
    if foreign is not None:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, foreign, {"states": len(starts)})
    try:
        return single_updates(changed)
    except StepError as error:
        return Verdict(Outcome.FAIL, CONTRACT, failure(error), {"updates": error.update})


def _starts(isolation: Isolation, batches: Sequence[Any], states: int) -> list[Start]:
    """States spread evenly over the baseline's way."""
    count = min(states, len(batches))
    chosen = {round(i * (len(batches) - 1) / max(1, count - 1)) for i in range(count)}
    starts = []
    for i, batch in enumerate(batches[: max(chosen) + 1]):
        if i in chosen:
            starts.append(Start(i + 1, map_tensors(Tensor.cpu, saved(isolation.subject)), batch))
        if i < max(chosen):
            isolation.step(clones(batch))
    return starts


class SingleUpdates:
    """Single updates from the same states, in float64 and by whoever is judged."""

    def __init__(self, baseline: Build, starts: Sequence[Start], seed: int) -> None:
        """Takes the baseline's updates.

        Raises:
            NotFloat64Error: it cannot be stepped in float64.
            StepError: it fails.
        """
        self.baseline, self.starts, self.seed = baseline, starts, seed
        exact = self._exact()
        try:
            self.truth = [numbers(frame) for frame in self._singles(exact, starts, to_float64)]
        except StepError as error:
            raise NotFloat64Error.stepping("the baseline", error) from error
        isolation = Isolation(baseline, seed)
        self.own = self._errors(isolation)
        self.random = exact.draws or isolation.draws
        self.parts = list(isolation.subject.state)
        types = {parameter.dtype for parameter in named_parameters(isolation.subject).values()}
        self.precision = max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})

    def __call__(self, changed: Build) -> Verdict:
        """Whether the errors of a changed subject are at most twice the baseline's.

        Raises:
            StepError: it fails.
        """
        isolation = Isolation(changed, self.seed)
        shared(self.parts, isolation.subject.state)
        theirs = self._errors(isolation)
        ratios = {group: self._ratios(theirs, group) for group in self.own[-1] if group in theirs[-1]}
        medians = {group: statistics.median(each) for group, each in ratios.items()}
        evidence = {"states": len(self.starts), "rounding": {group_name(g): plain(m) for g, m in medians.items()}}
        count = f"the median of {len(self.starts)} single updates"
        failed = next((group for group, median in medians.items() if median > ALLOWED), None)
        if failed is None:
            summary = f"at most {max(medians.values()):.2g} times the baseline's rounding in {count}"
            return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
        worst = max(range(len(self.starts)), key=lambda i: ratios[failed][i])
        found = self._locate(changed, self.starts[worst])
        summary = f"rounds {medians[failed]:.2g} times as much as the baseline ({group_name(failed)}, {count}): {found}"
        return Verdict(Outcome.FAIL, CONTRACT, summary, evidence | {"difference": found.data()})

    def foreign(self) -> str | None:
        """Why the updates in float64 cannot serve as the truth; None if they can."""
        median = max(statistics.median(each.get(group, 0.0) for each in self.own) for group in (OUTPUTS, GRADIENTS))
        if math.isfinite(median) and median <= (FOREIGN_AND_RANDOM if self.random else FOREIGN):
            return None
        why = "draws random numbers inside the step; draw them before and hand them in with the batch"
        return (
            f"the rounding cannot be compared: in float64 the baseline comes out otherwise by {median:.2g}; it "
            f"{why if self.random else 'is not finite, or computes something else there'}"
        )

    def _exact(self, watching: bool = False) -> Isolation:
        return Isolation(float64_build(self.baseline), self.seed, torch.float64, watching)

    def _singles(
        self, isolation: Isolation, starts: Sequence[Start], copied: Any = clones, watching: bool = False
    ) -> Iterator[Frame]:
        for start in starts:
            isolation.load(start.states, self.seed + start.update)
            yield isolation.step(copied(start.batch), watching)

    def _errors(self, isolation: Isolation) -> list[Errors]:
        frames = self._singles(isolation, self.starts)
        return [by_group(truth, frame) for truth, frame in zip(self.truth, frames, strict=True)]

    def _ratios(self, theirs: Sequence[Errors], group: Location) -> list[float]:
        pairs = ((own[group], other[group]) for own, other in zip(self.own, theirs, strict=True) if group in own)
        return [self._ratio(group, *pair) for pair in pairs]

    def _ratio(self, location: Location, own: float, other: float) -> float:
        least = FEWEST_ULPS[location.kind] * self.precision
        return max(other, least) / max(own, least)

    def _locate(self, changed: Build, start: Start) -> Difference:
        """Takes one update again, with slots that show what they return, to find the first that is too far off."""
        truth = next(self._singles(self._exact(watching=True), [start], to_float64, watching=True))
        own, theirs = (
            next(self._singles(Isolation(build, self.seed, watching=True), [start], watching=True))
            for build in (self.baseline, changed)
        )
        seen = {location: truth[location] for location in in_order(truth, theirs, self.parts) if location in truth}
        mine, other = one_by_one(seen, own), one_by_one(seen, theirs)
        ratios = {location: self._ratio(location, mine.get(location, 0.0), error) for location, error in other.items()}
        location = next(
            (location for location, ratio in ratios.items() if ratio > ALLOWED), max(ratios, key=ratios.__getitem__)
        )
        return _difference(start.update, location, truth[location], theirs[location])


def group_name(group: Location) -> str:
    """A group in words."""
    return {"output": "outputs", "gradient": "gradients", "state": f"'{group.name}' of the state"}[group.kind]


def _difference(update: int, location: Location, exact: Any, value: Any) -> Difference:
    """How a value differs from the truth; an element does, if it is further off than rounding the truth would be."""
    error = absolute_difference(exact, value)
    assert error is not None  # or there would be no ratio
    size = float(as_float64(exact).abs().max())
    precision = torch.finfo(value.dtype if isinstance(value, Tensor) else torch.float64).eps
    elements = int((error > precision * as_float64(exact).abs()).sum())
    absolute = float(error.max())
    return Difference(update, location.slot, str(location), absolute, absolute / size if size else math.inf, elements)
