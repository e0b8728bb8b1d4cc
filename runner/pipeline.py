"""From a recipe to learner, source and stages that are ready to train."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runner.api import Batch, Context, Probe, Setting, Slots, State, UsageError
from runner.errors import CheckpointError
from runner.recipe.errors import DEFAULT, Problem, RecipeError
from runner.secrets import redact

if TYPE_CHECKING:
    from runner.api import Learner, Source, Stage
    from runner.recipe.recipe import Recipe


@dataclass
class StageReport:
    """What became of a stage that the recipe switches on."""

    kind: str
    active: bool
    reason: str | None = None
    """Why it is not active."""
    notes: list[str] = field(default_factory=list)
    """What the stage has to say about this run."""


@dataclass
class Plan:
    """What is about to be built; ``batch_autotune`` changes it before anything is."""

    recipe: Recipe
    plugin_files: Sequence[Path]
    batch_size: int
    updates_per_step: float
    reports: dict[str, StageReport]
    preparing: str = ""

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size in a child process; None if memory does not suffice there."""
        largest = self.recipe.data.largest_batch()
        if largest is not None and batch_size > largest:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.yaml"
            path.touch(mode=0o600)
            path.write_text(
                json.dumps(self.recipe.values(masked=False), ensure_ascii=False)
            )  # the trial needs the secrets too
            command = [sys.executable, "-m", "runner.probe", str(path), str(batch_size), *map(str, self.plugin_files)]
            child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS)
        if child.returncode == OUT_OF_MEMORY or child.returncode < 0:
            return None  # refused by torch, or killed by the kernel
        if child.returncode != 0:
            raise UsageError(f"batch_autotune: a trial with batch size {batch_size} failed:\n{child.stderr.strip()}")
        return Probe(**json.loads(child.stdout))

    def note(self, text: str) -> None:
        """Adds a note to the stage that is being prepared."""
        self.reports[self.preparing].notes.append(redact(text))


OUT_OF_MEMORY = 77
"""Exit code of the probe when an allocation failed."""


PROBE_SECONDS = 900
"""Longer than any compilation takes; a probe that hangs must not hang the run."""


class Pipeline:
    """One learner, one source and the active stages around one set of slots."""

    def __init__(self, recipe: Recipe, context: Context, plan: Plan, prepared: dict[str, list[str]]) -> None:
        self.recipe = recipe
        self.context = context
        self.slots = context.slots
        self.device = context.device
        self.batch_size = plan.batch_size
        self.updates_per_step = plan.updates_per_step
        self.reports = plan.reports
        self.prepared = prepared
        """What stages have said about their choices (a batch size), which a resumed run must not make again."""
        self.stages: list[Stage] = []
        self._attaching = ""
        self.source: Source = recipe.data.implementation()(recipe.data, context)
        self.learner: Learner = recipe.model.implementation()(recipe.model, self.source.shapes, context)
        self.slots.define(
            sample=self.source.sample, transfer=self.transfer, next_batch=self.next_batch, update=self.learner.update
        )

    def attach(self, stages: Sequence[Stage]) -> None:
        """Attaches stages in the order given, then makes the optimizers."""
        for stage in stages:
            self._attaching = stage.kind
            stage.attach(self)
            self.stages.append(stage)
        self.learner.configure_optimizers()

    def note(self, text: str) -> None:
        """Adds a note to the stage that is being attached."""
        self.reports[self._attaching].notes.append(redact(text))

    def next_batch(self, batch_size: int, progress: float, remaining: int) -> Batch:
        """A batch on the device.

        Args:
            batch_size: its size.
            progress: share of the training that is over, 0 to 1.
            remaining: how many more batches will be asked for before the source changes.
        """
        batch: Batch = self.slots.transfer(self.slots.sample(batch_size, progress))
        return batch

    def transfer(self, batch: Batch) -> Batch:
        """Moves a batch to the device; tensors that are there already stay as they are."""
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def state_dict(self) -> State:
        """Everything that training changes."""
        return {
            "learner": self.learner.state_dict(),
            "source": self.source.state_dict(),
            "stages": {stage.kind: stage.state_dict() for stage in self.stages},
            "generators": {name: generator.get_state() for name, generator in self.context.generators.items()},
            "batch_size": self.batch_size,
            "updates_per_step": self.updates_per_step,
            "prepared": self.prepared,
            "device": self.device.type,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place.

        Raises:
            CheckpointError: it is the state of another pipeline.
        """
        if state["device"] != self.device.type:
            raise CheckpointError(
                f"the checkpoint was written on device '{state['device']}', and this is '{self.device.type}'; resume "
                "where there is one"
            )
        try:
            self._load(state)
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:  # torch's for shapes and names
            raise CheckpointError(f"the checkpoint does not fit this recipe: {error}") from error

    def _load(self, state: State) -> None:
        self.learner.load_state_dict(state["learner"])
        self.source.load_state_dict(state["source"])
        for stage in self.stages:
            stage.load_state_dict(state["stages"][stage.kind])
        for name, saved in state["generators"].items():
            self.context.generator(name).set_state(saved.cpu())
        self.batch_size = state["batch_size"]
        self.updates_per_step = state["updates_per_step"]


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` means here.

    Raises:
        UsageError: a GPU is asked for that does not exist.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if name == "cuda":
        device = torch.device("cuda", 0)  # torch selects only what has a number
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise UsageError(
            f"device: {name}: this machine offers {torch.cuda.device_count()} CUDA devices; use device: auto or cpu"
        )
    return device


def assemble(
    recipe: Recipe,
    plugin_files: Sequence[Path] = (),
    *,
    batch_size: int | None = None,
    resumed: State | None = None,
) -> Pipeline:
    """Builds the pipeline of a recipe.

    Args:
        recipe: validated.
        plugin_files: local plugin files that the recipe was validated with.
        batch_size: instead of the recipe's.
        resumed: the pipeline's state in a checkpoint; what stages have chosen before (the batch size) stays chosen.

    Raises:
        UsageError: a stage must not run here, or a value of the recipe is read by nobody.
    """
    device = resolve_device(recipe.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs belong to the current device
    setting = Setting(recipe.model, recipe.data, device, recipe.stages)
    reports = {kind: StageReport(kind, active=True) for kind in recipe.stages}
    active = [stage for stage in recipe.stages.values() if _is_active(stage, setting, reports, recipe)]

    plan = Plan(recipe, plugin_files, batch_size or recipe.train.batch_size, recipe.train.updates_per_step, reports)
    if resumed is not None:
        plan.batch_size, plan.updates_per_step = resumed["batch_size"], resumed["updates_per_step"]
        for kind, notes in resumed["prepared"].items():
            if kind in reports:  # a drifted recipe may have switched it off
                reports[kind].notes += notes
    else:
        for stage in active:
            plan.preparing = stage.kind
            stage.prepare(plan)
    prepared = {kind: list(report.notes) for kind, report in reports.items() if report.notes}

    pipeline = Pipeline(recipe, Context(device, Slots(), recipe.seed), plan, prepared)
    pipeline.attach(active)
    if resumed is None:  # what prepares a run has not been asked again
        _refuse_unread(recipe, active)
    return pipeline


def _is_active(stage: Stage, setting: Setting, reports: dict[str, StageReport], recipe: Recipe) -> bool:
    report = reports[stage.kind]
    try:
        report.reason = stage.inactive(setting)
    except UsageError as error:
        raise RecipeError([_problem(recipe, f"optimization.{stage.kind}", str(error))]) from None
    for other in stage.requires:
        if not reports[other].active:
            report.reason = f"it requires '{other}', which is inactive: {reports[other].reason}"
    report.active = report.reason is None
    return report.active


def _refuse_unread(recipe: Recipe, active: Sequence[Stage]) -> None:
    """A value that somebody wrote and that nothing has read by now would be ignored in silence."""
    unread = recipe.model.unread("model.") + recipe.data.unread("data.")
    for stage in active:
        unread += stage.config.unread(f"optimization.{stage.kind}.")
    written = [path for path in unread if recipe.origins.get(path, DEFAULT) is not DEFAULT]
    if written:
        raise RecipeError([_problem(recipe, path, "no plugin reads this value; remove it") for path in written])


def _problem(recipe: Recipe, path: str, message: str) -> Problem:
    return Problem(recipe.origins.get(path, DEFAULT), path, message)
