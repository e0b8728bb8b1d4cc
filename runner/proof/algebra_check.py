"""Compares the algebra of two subjects: their trajectories in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.plugin.contract import Close
from runner.proof.difference import (
    LOADED_TOLERANCE,
    TOLERANCE,
    compared_values,
    differing,
    locate,
    shared,
)
from runner.proof.fingerprints import (
    WHOLE_PROCESS,
    Fingerprints,
    SideEffects,
    fingerprints,
    leak,
    observed,
    side_effects,
)
from runner.proof.isolation import Frame, StepError
from runner.proof.modes import Casts, OtherFormat
from runner.proof.reproduction import Reproduction
from runner.proof.sensitivity import Sensitivity
from runner.proof.subject import Build
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory
from runner.proof.trees import map_tensors, to_float64
from runner.proof.verdict import Outcome, Verdict
from runner.system.tensor_trees import has_arithmetic

CONTRACT = Close.__name__
NARROWS = "narrows"
"""Key of the evidence for the operation that rounds the baseline's float64 numbers."""
SYSTEMATIC = "smallest_systematic_error"
"""Key of the evidence for the smallest detected error, as a share of an update."""


@dataclass(frozen=True)
class _Divergence:
    """The last comparison of two trajectories in float64.

    Attributes:
        update: The first update after which they differ by more than rounding; None if they do not.
        evidence: Evidence in addition to the numbers.
        expected: The last compared values of the baseline.
        actual: The last values of the candidate.
        fingerprints: The baseline's, one for each compared update.
    """

    update: int | None
    evidence: dict[str, Any]
    expected: Frame
    actual: Frame
    fingerprints: Fingerprints


def algebra(
    baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0
) -> Verdict:
    """Returns whether two subjects, both in float64, stay equal up to rounding; the
    evidence has ``side_effects``.
    """
    trajectory = Trajectory(batches, seed, float64=True)
    try:
        divergence = _first_divergence(trajectory, baseline, changed)
        evidence = {
            "updates": len(batches),
            "tolerance": TOLERANCE,
            **divergence.evidence,
        }
        update = divergence.update
        if update is None:
            return _judge_equal(trajectory, baseline, divergence, evidence)
        # A baseline that diverges from itself proves nothing about the change.
        if _first_divergence(trajectory, baseline, baseline).update is not None:
            summary = (
                "the baseline is not the same twice, in float64 with the same seeds; make it "
                "deterministic"
            )
            return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
        # A baseline that rounds in between does not compute in float64, whatever the change does.
        narrowed = _judge_casts(trajectory, baseline, divergence)
        if narrowed is not None:
            return narrowed
        criterion = partial(differing, tolerance=_tolerance(trajectory, update))
        difference = locate(trajectory, baseline, changed, update, criterion)
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    if difference is None:
        summary = (
            f"the difference after update {update} in float64 did not come again; make the step "
            "deterministic"
        )
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
    summary = f"not the same algebra: in float64, {difference}"
    reproduction = Reproduction(baseline, changed, trajectory, update, CONTRACT)
    return reproduction.fail(summary, difference, evidence)


def _judge_equal(
    trajectory: Trajectory,
    baseline: Build,
    divergence: _Divergence,
    evidence: dict[str, Any],
) -> Verdict:
    """Returns a PASS, unless the change reaches the baseline."""
    repeat = partial(observed, trajectory, baseline)
    repeated, effects = repeat()
    message = leak(
        divergence.fingerprints, repeated, lambda: repeat()[0], effects.parts
    )
    if message:
        evidence[WHOLE_PROCESS] = True
        return Verdict(Outcome.FAIL, CONTRACT, message, evidence)
    summary = f"the same algebra over {len(trajectory.batches)} updates in float64"
    smallest = evidence.get(SYSTEMATIC)
    if smallest:
        summary += f", which shows an error above {smallest:.0e} of each update"
    return Verdict(Outcome.PASS, CONTRACT, summary, evidence)


def _judge_casts(
    trajectory: Trajectory, baseline: Build, divergence: _Divergence
) -> Verdict | None:
    """Returns INCONCLUSIVE if a cast of the baseline explains the difference; else None."""
    isolation = trajectory.isolated(baseline)
    with Casts() as casts:  # type: ignore[no-untyped-call]
        next(trajectory.updated(isolation))
    computed = {
        location: value
        for location, value in divergence.expected.items()
        if location.kind != "state"
    }
    if not casts.explain(computed, divergence.actual):
        return None
    summary = (
        f"the algebra cannot be compared: in float64 the baseline itself rounds to "
        f"{casts.narrowest} ({casts.line}); cast to the wider of two types there, "
        "torch.promote_types(x.dtype, torch.float32)"
    )
    evidence = {"update": divergence.update, NARROWS: casts.line}
    return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, evidence)


def _first_divergence(
    trajectory: Trajectory, baseline: Build, changed: Build
) -> _Divergence:
    """Compares two subjects update by update, until they differ by more than rounding."""
    reference = trajectory.isolated(baseline)
    candidate = trajectory.isolated(changed)
    names = shared(reference.subject.state, candidate.subject.state)
    perturbed_frames = enumerate(_perturbed_frames(trajectory, baseline))
    # Kernels of the other memory format add up in another order, which is rounding as well.
    other_frames = enumerate(_perturbed_frames(trajectory, baseline, OtherFormat))
    first_loaded = _first_loaded(trajectory)
    sensitivity: Sensitivity | None = None
    evidence: dict[str, Any] = {}
    digests: Fingerprints = []
    diverging_update = None

    frames = zip(
        trajectory.frames(reference), trajectory.frames(candidate), strict=True
    )
    for update, (frame, actual) in enumerate(frames):
        digests += fingerprints([frame])
        expected = compared_values(frame, actual, names)
        tolerance = _tolerance(trajectory, update)
        if sensitivity is None:
            sensitivity = Sensitivity(expected)
        if update == first_loaded > 0:
            evidence[SYSTEMATIC] = sensitivity.smallest_error(expected)
        if not any(differing(expected, actual, tolerance)):
            continue
        # A difference counts only if it is larger than the one that rounding alone causes: the
        # yardstick is the baseline from a state that is perturbed by one ulp.
        yardsticks = (
            next(frame for number, frame in frames if number == update)
            for frames in (perturbed_frames, other_frames)
        )
        if all(
            any(differing(expected, actual, tolerance, perturbed))
            for perturbed in yardsticks
        ):
            diverging_update = update
            break

    evidence |= side_effects(SideEffects.of(reference), SideEffects.of(candidate))
    return _Divergence(diverging_update, evidence, expected, actual, digests)


def _first_loaded(trajectory: Trajectory) -> int:
    """Returns the number of updates before the first one that loads a state."""
    updates = trajectory.updates
    for number, update in enumerate(updates):
        if update.states is not None:
            return number
    return len(updates)


def _perturbed_frames(
    trajectory: Trajectory,
    baseline: Build,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Frame]:
    """Yields the baseline's values on a trajectory from states that are perturbed by one ulp.

    Args:
        trajectory: The updates.
        baseline: Makes the baseline.
        mode: Makes a context for each update.
    """
    isolation = trajectory.isolated(baseline)
    isolation.load(map_tensors(perturb, saved(isolation.subject)))
    # States that are loaded later replace the first one, so they are perturbed as well.
    updates = [
        replace(update, states=map_tensors(perturb, to_float64(update.states)))
        for update in trajectory.updates
    ]
    frames = replace(trajectory, batches=updates).frames(isolation)
    while True:
        # The code that reads the values runs outside of the context.
        with mode():
            frame = next(frames, None)
        if frame is None:
            return
        yield frame


def perturb(tensor: Tensor, number: int = 0) -> Tensor:
    """Returns the tensor with each element changed by at most one ulp, deterministically.

    Integer and sparse tensors are returned unchanged.

    Args:
        tensor: The tensor.
        number: Number of the perturbation; each number changes other elements.
    """
    if not has_arithmetic(tensor) or tensor.layout != torch.strided:
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel() + number)
    shares = torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
    epsilon = torch.finfo(tensor.dtype).eps
    return tensor * (1 + (2 * shares - 1) * epsilon).to(tensor.device)


def _tolerance(trajectory: Trajectory, update: int) -> float:
    """Returns the tolerance after an update, which depends on whether a state was loaded before."""
    updates = trajectory.updates[:update]
    is_loaded = any(update.states is not None for update in updates)
    return LOADED_TOLERANCE if is_loaded else TOLERANCE
