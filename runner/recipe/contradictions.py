"""Checks for contradictions between the sections of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.plugin.configs import DatasetConfig, GradientLearnerConfig
from runner.plugin.hybrid_sampling import HybridSamplingConfig
from runner.plugin.progress import UNITS
from runner.plugin.static_checks import describe_implementation, unmeasured
from runner.recipe.recipe import TrainConfig
from runner.recipe.yaml_nodes import Problem

if TYPE_CHECKING:
    from runner.plugin.configs import LearnerConfig, SourceConfig, StageConfig
    from runner.plugin.contract import Objective
    from runner.plugin.lr_scheduler import ScheduleConfig
    from runner.recipe.keeping import KeepConfig
    from runner.recipe.stopping import StopConfig
    from runner.recipe.yaml_nodes import Node

_UPDATE = "runner.plugin.learner.GradientLearner"
"""The class with the update of a module and a loss."""


def conflicts(
    root: Node,
    model: LearnerConfig | None,
    data: SourceConfig | None,
    train: TrainConfig | None,
    stages: Mapping[str, Mapping[str, StageConfig | None]],
    schedule: ScheduleConfig | None,
) -> list[Problem]:
    """Returns all contradictions between sections; a section that is None is not checked.

    ``stages`` are the stages that are on, by section, in the order in which they attach; ``root``
    contains the places.
    """
    # Pairs of a dotted path and a message.
    contradictions: list[tuple[str, str]] = []
    if train is not None:
        contradictions += _of_length(data, train)
    if model is not None and data is not None:
        contradictions += _of_model_and_data(root, model, data)
        objective = data.objective or model.objective or model.default_objective(data)
        if train is not None and train.stop is not None:
            contradictions += _of_stop(train, train.stop, objective)
        if train is not None and train.keep is not None:
            contradictions += _of_keep(train, train.keep, objective)
        if train is not None and schedule is not None:
            contradictions += _of_schedule(train, schedule, objective)
        if train is not None and train.on_nonfinite.action == "skip":
            contradictions += _of_skipping(model, data, stages)
    for section, section_stages in stages.items():
        contradictions += _of_stages(root, section, model, section_stages)
    return [
        Problem(root.asked(path), path, message) for path, message in contradictions
    ]


def _of_model_and_data(
    root: Node, model: LearnerConfig, data: SourceConfig
) -> Iterator[tuple[str, str]]:
    if model.learns_from != data.provides:
        citation = root.asked("model.kind").cited()
        learner = (
            f"model '{model.kind}' ({citation}) learns from {model.learns_from} data"
        )
        yield "data.kind", f"'{data.kind}' provides {data.provides} data, but {learner}"
        return
    if isinstance(data, DatasetConfig) and isinstance(
        data.sampling, HybridSamplingConfig
    ):
        yield from _of_hybrid_sampling(model, data)
    missing = unmeasured(type(model), type(data))
    if missing:
        yield "model.kind", missing


def _of_hybrid_sampling(
    model: LearnerConfig, data: DatasetConfig
) -> Iterator[tuple[str, str]]:
    key = "data.sampling"
    if not model.sample_losses:
        yield (
            key,
            f"hybrid sampling needs the loss of every sample, which '{model.kind}' does not "
            "return: use random",
        )
    if not data.divisible:
        yield key, f"'{data.kind}' needs all of its samples in every batch: use random"
    if data.workers:
        yield (
            "data.workers",
            f"{data.workers} would load ahead, and with hybrid sampling the losses of a batch "
            "decide which samples are next: use 0",
        )


def _of_stages(
    root: Node,
    section: str,
    model: LearnerConfig | None,
    stages: Mapping[str, StageConfig | None],
) -> Iterator[tuple[str, str]]:
    # By slot, the stage that replaces it: two stages cannot replace the same one.
    owners: dict[str, str] = {}
    for kind, stage in stages.items():
        if stage is None:
            continue
        path = f"{section}.{kind}"
        for required in stage.requires:
            if required not in stages:
                state = _state_of_missing_stage(root, section, required)
                hint = f"switch it on, or '{kind}' off"
                yield path, f"requires '{required}', which {state}: {hint}"
        for slot in sorted(stage.claims):
            owner = owners.setdefault(slot, kind)
            if owner != kind:
                citation = root.asked(f"{section}.{owner}").cited()
                problem = f"replaces '{slot}', and so does '{owner}' ({citation})"
                yield path, f"{problem}: switch one of them off"
        if model is not None:
            slots = sorted(stage.claims | stage.wraps)
            # Several slots may be missing for one reason, which is reported once.
            for reason in dict.fromkeys(filter(None, map(model.lacks, slots))):
                yield path, f"cannot work here: {reason}"


def _state_of_missing_stage(root: Node, section: str, kind: str) -> str:
    node = root.get(section, kind)
    if node is None:
        return "is not switched on"
    return f"is switched off ({node.anchor.cited()})"


def _of_length(
    data: SourceConfig | None, train: TrainConfig
) -> Iterator[tuple[str, str]]:
    set_units = [unit for unit in UNITS if getattr(train, unit) is not None]
    available_units = [unit for unit in UNITS if data is None or unit in data.units]
    if not set_units:
        settings = ", ".join(f"train.{unit}" for unit in available_units)
        yield "train", f"has no length: set one of {settings}"
        return

    first_unit = set_units[0]
    for unit in set_units[1:]:
        yield (
            f"train.{unit}",
            f"set either train.{first_unit} or train.{unit}, not both",
        )
    if data is None:
        return
    if first_unit not in available_units:
        yield (
            f"train.{first_unit}",
            f"has no effect here: '{data.kind}' counts {', '.join(available_units)}",
        )
    if (
        train.overfit_batches is not None
        and isinstance(data, DatasetConfig)
        and data.depends_on_feedback
    ):
        yield (
            "train.overfit_batches",
            "repeats the same batches, and hybrid sampling selects others: remove one of the two",
        )
    if isinstance(data, DatasetConfig) and not data.divisible:
        for setting in ("limit", "folds", "test"):
            if getattr(data, setting):
                yield (
                    f"data.{setting}",
                    f"'{data.kind}' needs all of its samples; remove it",
                )
    for key, message in data.contradictions(*train.length):
        yield f"data.{key}", message
    largest = data.largest_batch()
    if largest is not None and train.batch_size > largest:
        message = f"{train.batch_size:,} exceeds the largest batch of '{data.kind}' ({largest:,})"
        yield "train.batch_size", message


def _of_keep(
    train: TrainConfig, keep: KeepConfig, objective: Objective | None
) -> Iterator[tuple[str, str]]:
    if not keep.directions(objective):
        if keep.best > 1:
            message = "there is no objective here: set metrics, for instance {eval/loss: minimize}"
            yield "train.keep.best", message
        return
    if keep.best > 1 and train.evaluate_every is None:
        message = "there is only one evaluation, the last: set train.evaluate_every"
        yield "train.keep.best", message


def _of_skipping(
    model: LearnerConfig,
    data: SourceConfig,
    stages: Mapping[str, Mapping[str, StageConfig | None]],
) -> Iterator[tuple[str, str]]:
    """Yields why an update cannot be left before its optimizer is stepped."""
    key = "train.on_nonfinite"
    learner = describe_implementation(type(model))
    is_standard = learner is None or learner.owners.get("update") == _UPDATE
    if not isinstance(model, GradientLearnerConfig) or not is_standard:
        yield (
            key,
            f"'{model.kind}' has an update of its own, which may step an optimizer before a later "
            "loss is computed; undoing it would take a copy of all parameters and optimizers in "
            "every update: use stop",
        )
    if data.depends_on_feedback:
        yield key, f"'{data.kind}' needs the results of every update: use stop"
    for kind, stage in stages["optimization"].items():
        if stage is not None and stage.captures:
            yield (
                key,
                f"'{kind}' captures an update, which cannot end half-way: use stop",
            )


def _of_schedule(
    train: TrainConfig, schedule: ScheduleConfig, objective: Objective | None
) -> Iterator[tuple[str, str]]:
    if schedule.reacts_to_evaluations and train.evaluate_every is None:
        yield (
            "lr_scheduler.kind",
            f"'{schedule.kind}' reacts to evaluations, and there is only the last: "
            "set train.evaluate_every",
        )
    for setting, message in schedule.contradictions(objective):
        yield f"lr_scheduler.{setting}", message


def _of_stop(
    train: TrainConfig, stop: StopConfig, objective: Objective | None
) -> Iterator[tuple[str, str]]:
    if any(getattr(train, unit) is not None for unit in UNITS):
        unit, length = train.length
        if stop.not_before >= length:
            yield (
                "train.stop.not_before",
                f"{stop.not_before:,} leaves nothing of {length:,} {unit}",
            )
    if stop.seconds is not None:
        if stop.metric is not None:
            yield (
                "train.stop.metric",
                "has no effect: with seconds, only time is compared",
            )
        return
    condition = "reach" if stop.patience is None else "patience"
    if train.evaluate_every is None:
        yield (
            f"train.stop.{condition}",
            "is compared at evaluations, and there is only the last: set train.evaluate_every",
        )
    if stop.watched(objective) is not None:
        return
    if stop.metric is None and objective is None:
        yield (
            "train.stop",
            "there is no objective here: set metric, for instance eval/loss, and direction",
        )
    else:
        yield (
            "train.stop.metric",
            "is not the objective: set direction to minimize or maximize",
        )
