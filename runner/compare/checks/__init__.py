"""The checks of ``runner.proof.verify``, one file each."""

from runner.compare.checks.extreme_cases import ExtremeCasesCheck
from runner.compare.checks.gradients import GradientsCheck
from runner.compare.checks.hidden_numbers import HiddenNumbersCheck
from runner.compare.checks.random_numbers import RandomNumbersCheck
from runner.compare.checks.side_effects import SideEffectsCheck
from runner.compare.checks.steps import StepsCheck
from runner.compare.checks.steps_in_flight import StepsInFlightCheck
from runner.compare.subject_pair import SubjectCheck

CHECKS: tuple[type[SubjectCheck], ...] = (
    StepsCheck,
    StepsInFlightCheck,
    ExtremeCasesCheck,
    HiddenNumbersCheck,
    RandomNumbersCheck,
    GradientsCheck,
    SideEffectsCheck,
)
"""In the order in which they run."""
