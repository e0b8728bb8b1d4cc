"""The checks of ``runner verify``, one file each, and those that plugins add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.verify.checks.declared_slots import DeclaredSlotsCheck
from runner.verify.checks.epoch import EpochCheck
from runner.verify.checks.evaluations import EvaluationsCheck
from runner.verify.checks.held_out_data import HeldOutDataCheck
from runner.verify.checks.long_run import LongRunCheck
from runner.verify.checks.masked_failures import MaskedFailuresCheck
from runner.verify.checks.other_data import OtherDataCheck
from runner.verify.checks.predictions import PredictionsCheck
from runner.verify.checks.process_state import ProcessStateCheck
from runner.verify.checks.random_seeds import RandomSeedsCheck
from runner.verify.checks.resumed_training import ResumedTrainingCheck
from runner.verify.checks.sampled_batches import SampledBatchesCheck
from runner.verify.checks.schedules import SchedulesCheck
from runner.verify.checks.simulators import SimulatorsCheck
from runner.verify.checks.slot_shapes import SlotShapesCheck
from runner.verify.checks.torch_settings import TorchSettingsCheck
from runner.verify.checks.trained_model import TrainedModelCheck
from runner.verify.checks.trainings import TrainingsCheck
from runner.verify.checks.updates import UpdatesCheck
from runner.verify.checks.work_in_flight import WorkInFlightCheck

if TYPE_CHECKING:
    from runner.verify.training_plan import TrainingPlan

CHECKS = (
    UpdatesCheck,
    TorchSettingsCheck,
    DeclaredSlotsCheck,
    ProcessStateCheck,
    PredictionsCheck,
    SlotShapesCheck,
    EvaluationsCheck,
    SampledBatchesCheck,
    WorkInFlightCheck,
    EpochCheck,
    SimulatorsCheck,
    ResumedTrainingCheck,
    MaskedFailuresCheck,
    RandomSeedsCheck,
    HeldOutDataCheck,
    OtherDataCheck,
    TrainedModelCheck,
    SchedulesCheck,
    LongRunCheck,
)
"""In the order in which they run: the cheapest first, after updates."""


def checks_of(registry: Registry, plan: TrainingPlan) -> list[Check]:
    """Returns all checks in their order; trainings are last, because they take longest."""
    added = [check() for check in registry.checks]
    return [*(check() for check in CHECKS), *added, TrainingsCheck(plan)]
