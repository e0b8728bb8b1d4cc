"""Fingerprints of the values of a subject, and its side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.proof.difference import comparable, digest, newly_untrained, shared
from runner.proof.isolation import Frame, Isolation, Location
from runner.proof.subject import Build
from runner.proof.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from runner.proof.trajectory import Trajectory

WHOLE_PROCESS = "whole_process"
"""Key of the evidence that makes other comparisons in this process invalid."""
# Shapes that a message names.
_SHOWN = 3
Fingerprints = list[dict[Location, bytes]]
"""Fingerprints of all visible values before the first update and after each."""


class SideEffects(NamedTuple):
    """Properties of a subject in addition to its values.

    Attributes:
        parts: Names of the parts of its state.
        untrained: Parameters that no gradient has reached, with what they receive.
        overwritten: Outputs that a later update has overwritten, with the update that
            returned them.
        settings: Settings of torch, as the subject has left them.
        autocasts: Types to which autocast casts, with the update in which it did first.
        unlisted: Shapes of parameters that an optimizer trains and no part of the state has.
    """

    parts: list[str]
    untrained: Mapping[str, str]
    overwritten: Mapping[str, int]
    settings: Mapping[str, Any]
    autocasts: Mapping[str, int]
    unlisted: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, isolation: Isolation) -> SideEffects:
        """Returns the side effects of a subject."""
        return cls(
            parts=list(isolation.subject.state),
            untrained=isolation.untrained,
            overwritten=isolation.overwritten,
            settings=isolation.settings,
            autocasts=isolation.autocasts,
            unlisted=isolation.unlisted,
        )


def fingerprints(frames: Iterable[Frame]) -> Fingerprints:
    """Returns one fingerprint for every value of every frame."""
    return [
        {location: digest(value) for location, value in frame.items()}
        for frame in frames
    ]


def observed(trajectory: Trajectory, build: Build) -> tuple[Fingerprints, SideEffects]:
    """Returns a subject's fingerprints along a trajectory, and its side effects."""
    isolation = trajectory.isolated(build)
    frames = trajectory.frames(isolation)
    return fingerprints(frames), SideEffects.of(isolation)


def first_divergence(
    expected: Fingerprints, actual: Fingerprints, states: Iterable[str]
) -> tuple[int, Location] | None:
    """Returns the first update after which a value differs, and its location.

    Args:
        expected: The baseline's fingerprints.
        actual: The fingerprints that are compared with them.
        states: Names of the parts of the state that are compared.
    """
    names = list(states)
    pairs = zip(expected, actual, strict=True)
    for update, (expected_digests, digests) in enumerate(pairs):
        for location in comparable(expected_digests, digests, names):
            if expected_digests[location] != digests.get(location):
                return update, location
    return None


def leak(
    before: Fingerprints,
    after: Fingerprints,
    repeat: Callable[[], Fingerprints],
    states: Iterable[str],
) -> str | None:
    """Returns a message if a change that was made in between reaches the baseline, as far as
    can be detected.

    All arguments are the baseline's; one that is not reproducible after the change
    either gives no result.
    """
    names = list(states)
    divergence = first_divergence(before, after, names)
    # A baseline that varies from run to run would differ without a change, too.
    if divergence is None or first_divergence(after, repeat(), names) is not None:
        return None
    update, location = divergence
    position = "before the first update"
    if update:
        position = f"update {update}, slot '{location.slot}'"
    return (
        f"the change reaches the baseline, too: {position}: '{location}' of the baseline is not "
        "what it was before the change was made; it changes global state of the process (a "
        "function, a class, a global)"
    )


def side_effects(baseline: SideEffects, changed: SideEffects) -> dict[str, Any]:
    """Returns evidence: parts and gradients that only one of them has, overwritten outputs,
    casts, and settings that differ.
    """
    names = shared(baseline.parts, changed.parts)
    settings = {
        name: [repr(value), repr(changed.settings[name])]
        for name, value in baseline.settings.items()
        if value != changed.settings[name]
    }
    return {
        "not_compared": sorted({*baseline.parts, *changed.parts} - {*names}),
        "unlisted": [list(shape) for shape in baseline.unlisted],
        "missing": [name for name in baseline.parts if name not in names],
        "without_gradient": newly_untrained(baseline.untrained, changed.untrained),
        "overwritten": _new_items(baseline.overwritten, changed.overwritten),
        "autocasts": _new_items(baseline.autocasts, changed.autocasts),
        "settings": settings,
    }


def _new_items(
    baseline: Mapping[str, int], changed: Mapping[str, int]
) -> dict[str, int]:
    return {name: update for name, update in changed.items() if name not in baseline}


def objections(evidence: Mapping[str, Any], contract: str) -> list[Verdict]:
    """Returns the objections in such evidence against a change that computes the same numbers."""
    summaries = [
        f"update {update}, slot 'step': '{name}' is overwritten by a later update; return a copy"
        for name, update in evidence.get("overwritten", {}).items()
    ]
    # The numbers of ``Close`` are compared in float64, which autocast does not change.
    if contract == "Close":
        summaries += [
            f"update {update}, slot 'step': autocast casts to {name}, which the baseline's does not"
            for name, update in evidence.get("autocasts", {}).items()
        ]
    verdicts = [Verdict(Outcome.FAIL, contract, summary) for summary in summaries]
    unlisted = evidence.get("unlisted")
    if unlisted:
        shapes = ", ".join(str(shape) for shape in unlisted[:_SHOWN])
        if len(unlisted) > _SHOWN:
            shapes += f" and {len(unlisted) - _SHOWN} more"
        summary = (
            f"an optimizer trains parameters that no part of the baseline's state has ({shapes}): "
            "add the object that has them to `state`"
        )
        verdicts.append(Verdict(Outcome.INCONCLUSIVE, contract, summary))
    missing = evidence.get("missing")
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        reason = "cannot be compared: the changed one has nothing of that name"
        summary = f"{names} of the baseline's state {reason}"
        verdicts.append(Verdict(Outcome.INCONCLUSIVE, contract, summary))
    return verdicts
