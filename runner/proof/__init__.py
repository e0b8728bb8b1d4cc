"""Is a change of a training step harmless, and is it faster? For any PyTorch loop; no recipe is needed.

A step and its state make a ``Subject``; ``verify`` compares two of them, and ``clock`` times them.
"""

from runner.api import Close, Exact
from runner.proof.clock import Timing, clock
from runner.proof.close import close
from runner.proof.exact import exact
from runner.proof.gate import verify
from runner.proof.health import fresh, health
from runner.proof.statistics import NonInferiority, Ratio, ratio
from runner.proof.subject import Build, Subject
from runner.proof.verdict import Difference, Outcome, Verdict, worst

__all__ = [
    "Build",
    "Close",
    "Difference",
    "Exact",
    "NonInferiority",
    "Outcome",
    "Ratio",
    "Subject",
    "Timing",
    "Verdict",
    "clock",
    "close",
    "exact",
    "fresh",
    "health",
    "ratio",
    "verify",
    "worst",
]
