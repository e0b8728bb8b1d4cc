"""Fingerprints of the values of a subject, and its side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from runner.proof.difference import comparable, digest, newly_untrained, shared
from runner.proof.isolation import Frame, Isolation, Location
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict

# Key of the evidence that makes other comparisons in this process invalid.
WHOLE_PROCESS = "whole_process"
Prints = list[dict[Location, bytes]]  # of all that can be seen before the first update and after each


class SideEffects(NamedTuple):
    """Properties of a subject in addition to its values."""

    parts: list[str]  # of its state
    untrained: Mapping[str, str]  # parameters that no gradient has reached, with what they receive
    overwritten: Mapping[str, int]  # outputs that did not outlive the next update, with the update they were of
    settings: Mapping[str, Any]  # of torch, as it has left them
    autocasts: Mapping[str, int]  # types to which autocast casts, with the update in which it did first

    @classmethod
    def of(cls, isolation: Isolation) -> SideEffects:
        """Returns the side effects of a subject."""
        found = isolation.untrained, isolation.overwritten, isolation.settings, isolation.autocasts
        return cls(list(isolation.subject.state), *found)


def fingerprints(frames: Iterable[Frame]) -> Prints:
    """Returns one fingerprint for every value of every frame."""
    return [{location: digest(value) for location, value in frame.items()} for frame in frames]


def observed(trajectory: Trajectory, build: Build) -> tuple[Prints, SideEffects]:
    """A subject's fingerprints along a trajectory, and what else there was to it."""
    isolation = trajectory.isolated(build)
    return fingerprints(trajectory.frames(isolation)), SideEffects.of(isolation)


def parting(one: Prints, other: Prints, states: Iterable[str]) -> tuple[int, Location] | None:
    """The first update after which not all is the same, with these parts of the state, and where."""
    names = list(states)
    for update, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for location in comparable(mine, theirs, names):
            if mine[location] != theirs.get(location):
                return update, location
    return None


def leak(before: Prints, after: Prints, again: Callable[[], Prints], states: Iterable[str]) -> str | None:
    """Why a change that was made in between is not kept to itself; None if it is, as far as can be seen.

    All arguments are the baseline's; one that is not reproducible after the change
    either gives no result.
    """
    names = list(states)
    found = parting(before, after, names)
    if found is None or parting(after, again(), names) is not None:
        return None
    update, location = found
    when = f"update {update}, slot '{location.slot}'" if update else "before the first update"
    return (
        f"the change reaches the baseline, too: {when}: '{location}' of the baseline is not what it was before the "
        "change was made; it changes global state of the process (a function, a class, a global)"
    )


def side_effects(baseline: SideEffects, changed: SideEffects) -> dict[str, Any]:
    """Evidence: parts and gradients that one of them has, outputs that are overwritten, casts, settings that differ."""
    names = shared(baseline.parts, changed.parts)
    pairs = {name: (value, changed.settings[name]) for name, value in baseline.settings.items()}
    return {
        "not_compared": sorted({*baseline.parts, *changed.parts} - {*names}),
        "missing": [name for name in baseline.parts if name not in names],
        "without_gradient": newly_untrained(baseline.untrained, changed.untrained),
        "overwritten": {name: at for name, at in changed.overwritten.items() if name not in baseline.overwritten},
        "autocasts": {name: at for name, at in changed.autocasts.items() if name not in baseline.autocasts},
        "settings": {name: [repr(own), repr(other)] for name, (own, other) in pairs.items() if own != other},
    }


def objections(evidence: Mapping[str, Any], contract: str) -> list[Verdict]:
    """Returns the objections in such evidence against a change that computes the same numbers."""
    text = "update {1}, slot 'step': '{0}' is overwritten by a later update; return a copy"
    found = [Verdict(Outcome.FAIL, contract, text.format(*each)) for each in evidence.get("overwritten", {}).items()]
    if contract == "Close":  # whose numbers were compared in float64, which autocast leaves alone
        text = "update {1}, slot 'step': autocast casts to {0}, which the baseline's does not"
        found += [Verdict(Outcome.FAIL, contract, text.format(*each)) for each in evidence.get("autocasts", {}).items()]
    if missing := evidence.get("missing"):
        names = ", ".join(f"'{name}'" for name in missing)
        summary = f"{names} of the baseline's state cannot be compared: the changed one has nothing of that name"
        found.append(Verdict(Outcome.INCONCLUSIVE, contract, summary))
    return found
