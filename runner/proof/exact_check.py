"""The contract ``Exact``: the same bits as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runner.proof.difference import Difference, comparable, locate, not_same_bits, shared
from runner.proof.fingerprints import WHOLE_PROCESS, leak, observed, parting, side_effects
from runner.proof.isolation import StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict


def exact(baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Compares outputs, gradients and state by bits, after every update.

    The baseline is computed twice, before the changed one is built and after it: if it is not
    reproducible, the verdict is INCONCLUSIVE, unless the change is the reason. One subject exists
    at a time, two while a difference is located. On a GPU, both use torch's deterministic kernels.
    Arguments and exceptions are those of ``verify``; the evidence contains the result of
    ``fingerprints.side_effects``.
    """
    trajectory = Trajectory(batches, seed)
    try:
        first, own = observed(trajectory, baseline)
        prints, theirs = observed(trajectory, changed)
        again, _ = observed(trajectory, baseline)
        if parted := parting(first, again, own.parts):
            reached = leak(first, again, lambda: observed(trajectory, baseline)[0], own.parts)
            if reached is not None:
                return Verdict(Outcome.FAIL, "Exact", reached, {"update": parted[0], WHOLE_PROCESS: True})
            return _unstable(parted[0], locate(trajectory, baseline, baseline, parted[0], not_same_bits))
        names = shared(own.parts, theirs.parts)
        parted = parting(first, prints, names)
        found = locate(trajectory, baseline, changed, parted[0], not_same_bits) if parted else None
    except StepError as error:
        return error.verdict("Exact", baseline)
    count = len(list(comparable(first[-1], prints[-1], names)))
    evidence = {"updates": len(batches), "tensors": count} | side_effects(own, theirs)
    if parted is None:
        summary = f"{count:,} outputs, gradients and parts of the state have the same bits"
        when = f"after each of {len(batches)} updates" + (
            " with deterministic kernels" if torch.cuda.is_available() else ""
        )
        return Verdict(Outcome.PASS, "Exact", f"{summary} {when}", evidence)
    reproduction = Reproduction(baseline, changed, trajectory, parted[0], "Exact")
    if found is None:  # a value that depends on memory addresses may not differ again
        update, location = parted
        seen = f"update {update}, slot '{location.slot}': '{location}', though not when it was looked at again"
        return Verdict(Outcome.FAIL, "Exact", f"not the same bits: {seen}", evidence | {"update": update}, reproduction)
    summary = f"not the same bits: {found}"
    return Verdict(Outcome.FAIL, "Exact", summary, evidence | {"difference": found.data()}, reproduction)


def _unstable(update: int, found: Difference | None) -> Verdict:
    where = f"update {update}, not always in the same place" if found is None else str(found)
    summary = f"the same is not the same twice: {where}; make it deterministic (torch.use_deterministic_algorithms)"
    evidence = {"update": update, "difference": found and found.data()}
    return Verdict(Outcome.INCONCLUSIVE, "Exact", summary, evidence)
