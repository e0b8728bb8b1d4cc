"""The form of an entry: a baseline, a change, what is claimed, and the public source."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from exam.problems import Problem
from runner.proof import Build, Close, Exact

Change = Callable[[Problem], Build]
"""Makes the candidate from the baseline."""
HONEST = "harmless: computes the same"


@dataclass(frozen=True)
class Entry:
    """One change of a training step.

    Attributes:
        name: Unique in the exam.
        group: Letter of the group.
        source: The issue, paper or article that reports the fault; ``control`` for honest changes.
        claim: The claim that a user of the change would make.
        fault: Description of the fault; empty for honest changes.
        baseline: The problem without the change.
        change: Makes the candidate from the baseline.
        emulation: The same fault by hand, for versions of torch in which ``change`` does not have it.
        attacks: Whether the fault is in the numbers, or only in the time that is measured.
        is_honest: Whether the change is correct, so that it has to pass.
        contract: Contract under which the gate judges the change.
        explanation: Reason for a miss that the exam is known to have.
    """

    name: str
    group: str
    source: str
    claim: str
    fault: str
    baseline: Problem
    change: Change
    emulation: Change | None = None
    attacks: Literal["numbers", "time"] = "numbers"
    is_honest: bool = False
    contract: Exact | Close = field(default_factory=Close)
    explanation: str = ""


@dataclass
class Group:
    """Entries of one kind.

    Attributes:
        letter: Short name, used by entries.
        title: What the entries have in common.
        claim: The claim of most entries.
        attacks: What most entries attack.
    """

    letter: str
    title: str
    claim: str = HONEST
    attacks: Literal["numbers", "time"] = "numbers"
    entries: list[Entry] = field(default_factory=list)

    def wrong(self, name: str, source: str, baseline: Problem, **options):
        """Returns a decorator that adds a faulty change; its docstring is the description of the fault."""

        def add(change: Change) -> Change:
            fault = " ".join((change.__doc__ or "").split())
            self.add(name, source, fault, baseline, change, **options)
            return change

        return add

    def honest(self, name: str, baseline: Problem, **options):
        """Returns a decorator that adds a correct change."""

        def add(change: Change) -> Change:
            self.add(name, "control", "", baseline, change, is_honest=True, **options)
            return change

        return add

    def add(self, name: str, source: str, fault: str, baseline: Problem, change: Change, **options) -> None:
        """Adds an entry with the defaults of the group."""
        defaults = {"claim": self.claim, "attacks": self.attacks}
        common = {"name": name, "group": self.letter, "source": source, "fault": fault}
        self.entries.append(Entry(**common, baseline=baseline, change=change, **(defaults | options)))
