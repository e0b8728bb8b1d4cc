"""Names that plugins may import from the runner.

A plugin consists of settings and an implementation. The settings (a ``LearnerConfig``, a ``SourceConfig``, a
``ScheduleConfig``, a ``StageConfig`` or a ``CallbackConfig``) are sufficient for validation and for editors, and
import nothing slower than pydantic. The implementation (a ``Learner``, a ``Source``, a ``ScheduleState``, a
``Stage`` or a ``Callback``) imports torch and is loaded when a pipeline is assembled. Names of this module that
need torch are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runner.plugin.callback import Callback
from runner.plugin.check import Check
from runner.plugin.class_balance import ClassWeightsConfig
from runner.plugin.config import Config
from runner.plugin.configs import (
    CallbackConfig,
    DatasetConfig,
    FileDatasetConfig,
    GradientLearnerConfig,
    LearnerConfig,
    PublishedDatasetConfig,
    ServedRequest,
    ServedResponse,
    Setting,
    SourceConfig,
    StageConfig,
)
from runner.plugin.context import Context, Slots
from runner.plugin.contract import Close, Contract, Exact, Mean, Objective, Statistical
from runner.plugin.end_training import EndTraining
from runner.plugin.files import Anchor, DataFile, DataName, RecipePath
from runner.plugin.fingerprint import files_of_data, fingerprint_of_data, fingerprint_of_files
from runner.plugin.lr_scheduler import ScheduleConfig
from runner.plugin.memory_choice import MemoryChoice
from runner.plugin.optimizer import OptimizerSettings, restore
from runner.plugin.outline import SourceOutline, TensorOutline
from runner.plugin.progress import Progress, Unit
from runner.plugin.prunable import Prunable
from runner.plugin.ring import Ring
from runner.plugin.schedule_state import ScheduleState
from runner.plugin.sink import Sink
from runner.plugin.source import Batch, Source, State
from runner.plugin.stage import Pipeline, Plan, Probe, Stage
from runner.plugin.tuning import Choices
from runner.system.byte_size import format_size, parse_size
from runner.system.errors import RunnerError, UsageError
from runner.system.files import replacing
from runner.system.hardware import available_memory, slow_bf16
from runner.system.manifest import Manifest
from runner.system.stored_json import sealed, split_sealed
from runner.system.tensor_trees import BatchLayout, map_tensors, nbytes, stored_tensors, tensors

if TYPE_CHECKING:
    from runner.plugin.chunked_dataset import ChunkedDataset
    from runner.plugin.dataset import DatasetSource
    from runner.plugin.generators import HostGeneratorStates, find_generators
    from runner.plugin.gradient_bucket import GradientBucket
    from runner.plugin.hdf5_dataset import Hdf5Dataset
    from runner.plugin.learner import GradientLearner, Learner
    from runner.plugin.loss import Loss
    from runner.plugin.part_counts import PartCounts
    from runner.plugin.repeatability import describe_randomness
    from runner.plugin.role import Role
    from runner.plugin.rows import Rows, TensorRows
    from runner.plugin.zarr_dataset import ZarrDataset
    from runner.proof.ratios import Effect, Ratio, effect, ratio
    from runner.system.stopwatch import Stopwatch

_HEAVY = {
    "DatasetSource": "runner.plugin.dataset",
    "GradientBucket": "runner.plugin.gradient_bucket",
    **dict.fromkeys(("HostGeneratorStates", "find_generators"), "runner.plugin.generators"),
    "ChunkedDataset": "runner.plugin.chunked_dataset",
    "Hdf5Dataset": "runner.plugin.hdf5_dataset",
    "ZarrDataset": "runner.plugin.zarr_dataset",
    **dict.fromkeys(("GradientLearner", "Learner"), "runner.plugin.learner"),
    "Loss": "runner.plugin.loss",
    "PartCounts": "runner.plugin.part_counts",
    "SampleReader": "runner.plugin.repeatability",
    "describe_randomness": "runner.plugin.repeatability",
    "has_numbers": "runner.plugin.inspection",
    "Role": "runner.plugin.role",
    **dict.fromkeys(("Rows", "TensorRows"), "runner.plugin.rows"),
    **dict.fromkeys(("Effect", "Ratio", "effect", "ratio"), "runner.proof.ratios"),
    "Stopwatch": "runner.system.stopwatch",
}
"""Where the names are that need torch."""

__all__ = [
    "Anchor", "Batch", "BatchLayout", "Callback", "CallbackConfig", "Check", "Choices",
    "ChunkedDataset",
    "ClassWeightsConfig", "Close", "Config", "Context", "Contract",
    "DataFile", "DataName", "DatasetConfig", "DatasetSource", "Effect", "EndTraining", "Exact",
    "FileDatasetConfig", "GradientBucket", "GradientLearner", "GradientLearnerConfig",
    "Hdf5Dataset", "HostGeneratorStates", "Learner", "LearnerConfig",
    "Loss", "Manifest", "Mean", "MemoryChoice", "Objective", "OptimizerSettings", "PartCounts",
    "Pipeline", "Plan", "Probe",
    "Progress", "Prunable", "PublishedDatasetConfig", "Ratio", "RecipePath", "Ring", "Role", "Rows",
    "RunnerError", "ScheduleConfig", "ScheduleState",
    "ServedRequest", "ServedResponse", "Setting", "Sink", "Slots", "Source", "SourceConfig",
    "SourceOutline", "Stage", "StageConfig", "State", "Statistical", "Stopwatch", "TensorOutline",
    "TensorRows", "Unit", "UsageError", "ZarrDataset", "available_memory", "describe_randomness",
    "effect", "files_of_data",
    "find_generators", "fingerprint_of_data", "fingerprint_of_files", "format_size",
    "map_tensors", "nbytes", "parse_size", "ratio", "replacing", "restore", "sealed", "slow_bf16", "split_sealed",
    "stored_tensors", "tensors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"runner.api has no '{name}'")
    return getattr(import_module(_HEAVY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
