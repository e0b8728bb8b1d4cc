"""The checks of ``runner.proof.verify``, one file each."""

from runner.proof.checks.extreme_cases import ExtremeCasesCheck
from runner.proof.checks.gradients import GradientsCheck
from runner.proof.checks.hidden_numbers import HiddenNumbersCheck
from runner.proof.checks.random_numbers import RandomNumbersCheck
from runner.proof.checks.side_effects import SideEffectsCheck
from runner.proof.checks.steps import StepsCheck
from runner.proof.checks.steps_in_flight import StepsInFlightCheck
from runner.proof.subject_pair import SubjectCheck

CHECKS: tuple[type[SubjectCheck], ...] = (
    StepsCheck,
    StepsInFlightCheck,
    ExtremeCasesCheck,
    HiddenNumbersCheck,
    RandomNumbersCheck,
    GradientsCheck,
    SideEffectsCheck,
)
"""All checks in the order in which they run."""
