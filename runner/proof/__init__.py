"""Checks and times a change of a training step, for any PyTorch loop; it needs no recipe.

A step and its state make a ``Subject``; ``verify`` compares two of them, and ``clock`` times them.
"""

from runner.plugin.contract import Close, Exact
from runner.proof.checks.gradients import health
from runner.proof.checks.steps import fresh
from runner.proof.close_check import close
from runner.proof.difference import Difference
from runner.proof.exact_check import exact
from runner.proof.interleaved_timing import Timing, clock
from runner.proof.noninferiority import NonInferiority
from runner.proof.ratios import Ratio, ratio
from runner.proof.subject import Build, Subject
from runner.proof.verdict import Outcome, Verdict, worst
from runner.proof.verify_subjects import verify

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
