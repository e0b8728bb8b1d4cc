"""Is a change of a training step harmless, and is it faster? For any PyTorch loop; no recipe is needed.

A step and its state make a ``Subject``; ``verify`` compares two of them, and ``clock`` times them.
"""

from runner.compare.checks.gradients import health
from runner.compare.checks.steps import fresh
from runner.compare.clock import Timing, clock
from runner.compare.close import close
from runner.compare.difference import Difference
from runner.compare.exact import exact
from runner.compare.noninferiority import NonInferiority
from runner.compare.ratio import Ratio, ratio
from runner.compare.subject import Build, Subject
from runner.compare.verdict import Outcome, Verdict, worst
from runner.compare.verify import verify
from runner.plugin.contract import Close, Exact

__all__ = [
    "Build", "Close", "Difference", "Exact", "NonInferiority", "Outcome", "Ratio", "Subject", "Timing", "Verdict",
    "clock", "close", "exact", "fresh", "health", "ratio", "verify", "worst",
]  # fmt: skip
