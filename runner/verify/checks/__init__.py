"""The checks of ``runner verify``, one file each, and those that plugins add."""

from __future__ import annotations

from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.verify.checks.declared_slots import DeclaredSlots
from runner.verify.checks.epoch import Epoch
from runner.verify.checks.evaluations import Evaluations
from runner.verify.checks.long_run import LongRun
from runner.verify.checks.predictions import Predictions
from runner.verify.checks.process_state import ProcessState
from runner.verify.checks.resumed_training import ResumedTraining
from runner.verify.checks.sampled_batches import SampledBatches
from runner.verify.checks.schedules import Schedules
from runner.verify.checks.torch_settings import TorchSettings
from runner.verify.checks.trainings import Trainings
from runner.verify.checks.updates import Updates
from runner.verify.training_plan import TrainingPlan

CHECKS = (
    Updates,
    TorchSettings,
    DeclaredSlots,
    ProcessState,
    Predictions,
    Evaluations,
    SampledBatches,
    Epoch,
    ResumedTraining,
    Schedules,
    LongRun,
)
"""In the order in which they run: the cheapest first, after updates."""


def checks_of(registry: Registry, plan: TrainingPlan) -> list[Check]:
    """Returns all checks in their order; trainings are last, because they take longest."""
    added = [check() for check in registry.checks]
    return [*(check() for check in CHECKS), *added, Trainings(plan)]
