"""The contract ``Exact``: the same bits as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from runner.proof.difference import (
    Difference,
    comparable,
    locate,
    not_same_bits,
    shared,
)
from runner.proof.fingerprints import (
    WHOLE_PROCESS,
    first_divergence,
    leak,
    observed,
    side_effects,
)
from runner.proof.isolation import StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict

CONTRACT = "Exact"


def exact(
    baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0
) -> Verdict:
    """Compares outputs, gradients and state by bits, after every update.

    The baseline is computed twice, before the changed one is built and after it: if it is not
    reproducible, the verdict is INCONCLUSIVE, unless the change is the reason. One subject exists
    at a time, two while a difference is located. On a GPU, both use torch's deterministic kernels.
    Arguments and exceptions are those of ``verify``; the evidence contains the result of
    ``fingerprints.side_effects``.
    """
    trajectory = Trajectory(batches, seed)
    difference = None
    try:
        expected, baseline_effects = observed(trajectory, baseline)
        actual, changed_effects = observed(trajectory, changed)
        # This run shows whether the baseline is reproducible, and whether the change reaches it.
        repeated, _ = observed(trajectory, baseline)
        parts = baseline_effects.parts
        divergence = first_divergence(expected, repeated, parts)
        if divergence:
            update, _ = divergence
            repeat = partial(observed, trajectory, baseline)
            message = leak(expected, repeated, lambda: repeat()[0], parts)
            if message is not None:
                leaked = {"update": update, WHOLE_PROCESS: True}
                return Verdict(Outcome.FAIL, CONTRACT, message, leaked)
            difference = locate(trajectory, baseline, baseline, update, not_same_bits)
            return _unstable(update, difference)
        names = shared(parts, changed_effects.parts)
        divergence = first_divergence(expected, actual, names)
        if divergence:
            update, _ = divergence
            difference = locate(trajectory, baseline, changed, update, not_same_bits)
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    count = len(list(comparable(expected[-1], actual[-1], names)))
    evidence: dict[str, Any] = {"updates": len(batches), "tensors": count}
    evidence |= side_effects(baseline_effects, changed_effects)
    if divergence is None:
        summary = (
            f"{count:,} outputs, gradients and parts of the state have the same bits after each of "
            f"{len(batches)} updates"
        )
        if torch.cuda.is_available():
            summary += " with deterministic kernels"
        return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
    update, location = divergence
    reproduction = Reproduction(baseline, changed, trajectory, update, CONTRACT)
    if difference is not None:
        summary = f"not the same bits: {difference}"
        return reproduction.fail(summary, difference, evidence)
    # A value that depends on memory addresses may not differ again.
    position = f"update {update}, slot '{location.slot}'"
    summary = f"not the same bits: {position}: '{location}', though not when it was looked at again"
    evidence["update"] = update
    return Verdict(Outcome.FAIL, CONTRACT, summary, evidence, reproduction)


def _unstable(update: int, difference: Difference | None) -> Verdict:
    """Returns the verdict on a baseline that is not reproducible."""
    position = f"update {update}, not always in the same place"
    data = None
    if difference is not None:
        position = str(difference)
        data = difference.data()
    summary = (
        f"the same is not the same twice: {position}; make it deterministic "
        "(torch.use_deterministic_algorithms)"
    )
    evidence = {"update": update, "difference": data}
    return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, evidence)
