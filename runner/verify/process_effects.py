"""Stages that have changed global state of the process, after which no comparison in it is
valid.
"""

from __future__ import annotations

from runner.proof.fingerprints import WHOLE_PROCESS
from runner.proof.verdict import Outcome, Verdict

# A baseline that another gate builds in this process is changed, too.
_culprits: list[tuple[str, ...]] = []
"""Stages that have changed this process."""


def culprits() -> tuple[str, ...]:
    """Returns the stages that have changed this process; none if nothing has."""
    return _culprits[0] if _culprits else ()


def note_effects(stages: tuple[str, ...], verdict: Verdict) -> None:
    """Records stages whose verdict reports an effect on the process."""
    evidence = verdict.evidence.get("contract", verdict.evidence)
    if WHOLE_PROCESS in evidence and not _culprits:
        _culprits.append(stages)


def uncomparable(contract: str) -> Verdict:
    """Returns the verdict in a process that a stage has changed."""
    names = " + ".join(culprits())
    summary = f"{names} has changed global state of the process: verify it alone"
    return Verdict(Outcome.INCONCLUSIVE, contract, summary)


def forget_effects() -> None:
    """Forgets all of them, for a test that has reversed the effects of its stage."""
    _culprits.clear()
