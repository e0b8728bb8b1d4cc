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
from runner.compare.float64 import NotWideError, wide_build
from runner.compare.isolation import Frame, Place, StepError, World
from runner.compare.state import clones, doubled, mapped, named_parameters, saved
from runner.compare.subject import Build
from runner.compare.trajectory import failure, in_order, shared
from runner.compare.values import apart, wide
from runner.compare.verdict import Difference, Outcome, Verdict, plain

CONTRACT = "Close"
ALLOWED = 2.0
"""How many times as far from the truth as the baseline, in the median."""
FEWEST_ULPS = {"output": 4, "gradient": 1, "state": 1}
"""What by luck is nearer than so many units in the last place counts as being so far away; outputs can be few."""
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
    starts = _way(World(baseline, seed), batches, states)
    try:
        judge = Judge(baseline, starts, seed)
    except NotWideError as error:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, str(error))
    foreign = judge.foreign()
    if foreign is not None:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, foreign, {"states": len(starts)})
    try:
        return judge(changed)
    except StepError as error:
        return Verdict(Outcome.FAIL, CONTRACT, failure(error), {"updates": error.update})


def _way(world: World, batches: Sequence[Any], states: int) -> list[Start]:
    """States spread evenly over the baseline's way."""
    count = min(states, len(batches))
    chosen = {round(i * (len(batches) - 1) / max(1, count - 1)) for i in range(count)}
    starts = []
    for i, batch in enumerate(batches[: max(chosen) + 1]):
        if i in chosen:
            starts.append(Start(i + 1, mapped(Tensor.cpu, saved(world.subject)), batch))
        if i < max(chosen):
            world.step(clones(batch))
    return starts


class Judge:
    """Single updates from the same states, in float64 and by whoever is judged."""

    def __init__(self, baseline: Build, starts: Sequence[Start], seed: int) -> None:
        """Takes the baseline's updates.

        Raises:
            NotWideError: it cannot be stepped in float64.
            StepError: it fails.
        """
        self.baseline, self.starts, self.seed = baseline, starts, seed
        exact = self._exact()
        try:
            self.truth = [numbers(frame) for frame in self._singles(exact, starts, doubled)]
        except StepError as error:
            raise NotWideError.stepping("the baseline", error) from error
        world = World(baseline, seed)
        self.own = self._errors(world)
        self.random = exact.draws or world.draws
        self.parts = list(world.subject.state)
        types = {parameter.dtype for parameter in named_parameters(world.subject).values()}
        self.precision = max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})

    def __call__(self, changed: Build) -> Verdict:
        """Whether the errors of a changed subject are at most twice the baseline's.

        Raises:
            StepError: it fails.
        """
        world = World(changed, self.seed)
        shared(self.parts, world.subject.state)
        theirs = self._errors(world)
        ratios = {group: self._ratios(theirs, group) for group in self.own[-1] if group in theirs[-1]}
        medians = {group: statistics.median(each) for group, each in ratios.items()}
        evidence = {"states": len(self.starts), "rounding": {shown(g): plain(m) for g, m in medians.items()}}
        count = f"the median of {len(self.starts)} single updates"
        failed = next((group for group, median in medians.items() if median > ALLOWED), None)
        if failed is None:
            summary = f"at most {max(medians.values()):.2g} times the baseline's rounding in {count}"
            return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
        worst = max(range(len(self.starts)), key=lambda i: ratios[failed][i])
        found = self._locate(changed, self.starts[worst])
        summary = f"rounds {medians[failed]:.2g} times as much as the baseline ({shown(failed)}, {count}): {found}"
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

    def _exact(self, watching: bool = False) -> World:
        return World(wide_build(self.baseline), self.seed, torch.float64, watching)

    def _singles(
        self, world: World, starts: Sequence[Start], copied: Any = clones, watching: bool = False
    ) -> Iterator[Frame]:
        for start in starts:
            world.load(start.states, self.seed + start.update)
            yield world.step(copied(start.batch), watching)

    def _errors(self, world: World) -> list[Errors]:
        frames = self._singles(world, self.starts)
        return [by_group(truth, frame) for truth, frame in zip(self.truth, frames, strict=True)]

    def _ratios(self, theirs: Sequence[Errors], group: Place) -> list[float]:
        pairs = ((own[group], other[group]) for own, other in zip(self.own, theirs, strict=True) if group in own)
        return [self._ratio(group, *pair) for pair in pairs]

    def _ratio(self, place: Place, own: float, other: float) -> float:
        least = FEWEST_ULPS[place.kind] * self.precision
        return max(other, least) / max(own, least)

    def _locate(self, changed: Build, start: Start) -> Difference:
        """Takes one update again, with slots that show what they return, to find the first that is too far off."""
        truth = next(self._singles(self._exact(watching=True), [start], doubled, watching=True))
        own, theirs = (
            next(self._singles(World(build, self.seed, watching=True), [start], watching=True))
            for build in (self.baseline, changed)
        )
        seen = {place: truth[place] for place in in_order(truth, theirs, self.parts) if place in truth}
        mine, other = one_by_one(seen, own), one_by_one(seen, theirs)
        ratios = {place: self._ratio(place, mine.get(place, 0.0), error) for place, error in other.items()}
        place = next((place for place, ratio in ratios.items() if ratio > ALLOWED), max(ratios, key=ratios.__getitem__))
        return _difference(start.update, place, truth[place], theirs[place])


def shown(group: Place) -> str:
    """A group in words."""
    return {"output": "outputs", "gradient": "gradients", "state": f"'{group.name}' of the state"}[group.kind]


def _difference(update: int, place: Place, exact: Any, value: Any) -> Difference:
    """How a value differs from the truth; an element does, if it is further off than rounding the truth would be."""
    distance = apart(exact, value)
    assert distance is not None  # or there would be no ratio
    size = float(wide(exact).abs().max())
    precision = torch.finfo(value.dtype if isinstance(value, Tensor) else torch.float64).eps
    elements = int((distance > precision * wide(exact).abs()).sum())
    absolute = float(distance.max())
    return Difference(update, place.slot, str(place), absolute, absolute / size if size else math.inf, elements)
