"""Assembles the learner, source and stages of a recipe into a pipeline that is ready to train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.distributed.division import divide, draws_parts
from runner.distributed.refusals import refuse_stages
from runner.plugin.class_balance import ClassWeightsConfig, weights_of_classes
from runner.plugin.configs import LearnerConfig, Setting, SourceConfig, StageConfig
from runner.plugin.context import STEP, Context, Slots
from runner.plugin.gradient_bucket import GradientBucket
from runner.plugin.implementation import imported
from runner.plugin.learner import Learner
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, Source, State
from runner.plugin.stage import Probe, Stage
from runner.plugin.tuning import Choices, Tuning
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import DEFAULT, Problem, RecipeError, is_lock
from runner.system.errors import CheckpointError, RunnerError, UsageError
from runner.system.tensor_trees import map_tensors
from runner.system.torch_settings import require_deterministic_kernels
from runner.training.parameter_groups import configure_optimizers
from runner.training.recipe_errors import last_origin, located, recipe_error
from runner.training.resuming import (
    apply_changed_settings,
    refuse_other_classes,
    settings_of_state,
)
from runner.training.role_checks import check_roles
from runner.training.stage_watch import StageReport, Watch
from runner.training.state_schema import check_finite, check_weights, fitting
from runner.training.tuning import prepare_once, tuning_of

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup
    from runner.training.init_from import Start


class Assembly:
    """A learner, a source and the active stages around one set of slots.

    Attributes:
        folder: Where stages store the files that they make of a finished run.
        prepared: Notes of stages about the batch size, which a resumed run keeps.
        base_rates: Learning rate of every parameter group before any schedule, by optimizer.
        watch: Records the slot calls of the first updates; None when these are over.
        draws_parts: Whether every process draws a part of each batch itself.
        parallel: Divides updates among processes; None for a single one.
    """

    folder: Path | None = None

    def __init__(
        self,
        recipe: Recipe,
        plugin_files: Sequence[Path],
        device: torch.device,
        batch_size: int,
        resumed: State | None,
        build_source: Callable[[Any, Context], Source] | None = None,
        tuning: Tuning | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        """Builds the pipeline of a recipe; see ``assemble``.

        ``build_source`` builds another source than the recipe's.
        """
        self.recipe = recipe
        self.plugin_files = plugin_files
        self.device = device
        self.batch_size = batch_size
        self.shapes_vary = recipe.data.shapes_vary

        self.reports = {kind: StageReport(kind, active=True) for kind in recipe.stages}
        count = 1 if processes is None else processes.count
        context = setting_of(recipe, device, processes=count)
        active = {
            kind: stage
            for kind, stage in recipe.stages.items()
            if self._is_active(stage, context)
        }
        if processes is not None:
            refuse_stages(active, context)
        # All implementations are imported before anything is built.
        source_class = build_source or imported(recipe.data)
        learner_class = imported(recipe.model)
        self.stages = {
            kind: imported(stage)(stage.recorded()) for kind, stage in active.items()
        }

        self.tuning = tuning_of(recipe, device) if tuning is None else tuning
        # The choices of these stages cannot change after the first update.
        self._fixed = frozenset(
            kind for kind, stage in active.items() if stage.prepares
        )
        self._processes = processes
        self.prepared = self._prepare(resumed)

        self.slots = Slots()
        self.context = Context(
            device,
            self.slots,
            recipe.seed,
            recipe.train.batch_size,
            recipe.optimizer,
            recipe.train.ema,
            processes=processes,
            overfit_batches=recipe.train.overfit_batches,
            sample_losses=recipe.data.depends_on_feedback,
        )
        model = recipe.model.recorded()
        data = self._adapted(recipe.data).recorded()
        self.source: Source = source_class(data, self.context)
        self._refuse_unrepeatable()
        self._refuse_unbalanced()
        if resumed is not None:
            refuse_other_classes(resumed.get("classes"), self.source.classes)
        self.context.sizes = self.source.sizes
        self.context.tables = self.source.tables
        self.context.classes = tuple(self.source.classes)
        self.context.class_weights = self._class_weights(model)
        # Slots that exist by now are called outside of an update.
        outer_slots = STEP | vars(self.slots).keys()

        self.learner: Learner = learner_class(model, self.source.shapes, self.context)
        initial_run = recipe.model.init_from if resumed is None else None
        self.start = None if initial_run is None else self._start_from(initial_run)
        epoch_samples = self.source.epoch_samples(self.batch_size)
        self.progress = Progress(*recipe.length, epoch_samples)
        self.context.progress = self.progress
        self._refuse_unknown_epochs()
        self._define_steps()

        watch = Watch(self.slots, outer_slots | recipe.model.answering)
        self._attach(active, watch)
        self.draws_parts = draws_parts(recipe.data, processes)
        self.parallel = None if processes is None else divide(self, processes)
        self.undeclared = watch.undeclared
        self.watch = watch if any(watch.slots_by_stage.values()) else None
        self.source.bind(self.learner)

        read_stages = self._read_stages(resumed)
        self._recorded = {
            f"optimization.{kind}": stage.config for kind, stage in read_stages.items()
        }
        self._recorded |= {"model": model, "data": data}

    def _read_stages(self, resumed: State | None) -> dict[str, Stage]:
        """Returns the stages that have to read all of their settings here."""
        # A stage that prepared the run does so only once, in one process: a resumed run and the
        # other processes read none of its settings.
        is_first = self._processes is None or not self._processes.rank
        prepares = resumed is None and is_first
        return {
            kind: stage
            for kind, stage in self.stages.items()
            if prepares or kind not in self._fixed
        }

    def _prepare(self, resumed: State | None) -> dict[str, list[str]]:
        """Lets stages change what is built, or restores their changes; returns their notes."""
        processes = self._processes
        if resumed is None:
            for kind, stage in self.stages.items():
                self._current_report = self.reports[kind]
                if processes is None or kind not in self._fixed:
                    stage.prepare(self)
                else:
                    notes = self._current_report.notes
                    prepare_once(stage, self, notes, processes)
        else:
            self.batch_size = resumed["batch_size"]
            self.tuning.restore(resumed.get("tuning", {}), self._fixed)
            # A changed recipe may have switched a stage off.
            for kind in resumed["prepared"].keys() & self.reports.keys():
                self.reports[kind].notes += resumed["prepared"][kind]
        reports = self.reports.items()
        return {kind: list(report.notes) for kind, report in reports if report.notes}

    def _adapted(self, data: SourceConfig) -> SourceConfig:
        """Returns the settings of the source as the stages have changed them."""
        for stage in self.stages.values():
            data = stage.adapt_source(data)
        return data

    def _define_steps(self) -> None:
        """Defines the slots of a training step.

        Raises:
            RunnerError: The source or the learner defines one of them.
        """
        conflicts = STEP & vars(self.slots).keys()
        if conflicts:
            owners = f"{type(self.source).__name__} or {type(self.learner).__name__}"
            raise RunnerError(
                f"{owners} defines the slot '{min(conflicts)}', which is the runner's: "
                "use another name"
            )
        update = self.learner.update
        if self.recipe.train.ema is not None:
            update = self.learner.averaged_update
        self.slots.define(
            draw=self.source.draw,
            transfer=self.transfer,
            next_batch=self.next_batch,
            update=update,
        )
        if self.context.processes is not None:
            self.slots.define(sum_gradients=GradientBucket.sum)

    def _attach(self, active: Mapping[str, StageConfig], watch: Watch) -> None:
        """Attaches the stages to the slots, and makes the optimizers."""
        for kind, stage in self.stages.items():
            report = self.reports[kind]
            self._current_report = report
            with watch.attaching(active[kind], report, self.learner.compilable):
                stage.attach(self)
        with watch.watching():
            configure_optimizers(self.recipe, self.learner)
        self.learner.start_averages()
        self.base_rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for _, optimizer in self.learner.optimizers()
        ]
        check_roles(self.learner)

    def _refuse_unknown_epochs(self) -> None:
        """Raises a RecipeError if the source does not report the epochs that are the length."""
        if self.progress.unit != "epochs" or self.progress.epoch_samples is not None:
            return
        raise recipe_error(
            self.recipe,
            "train.epochs",
            f"'{self.recipe.data.kind}' does not report how long an epoch is: "
            "use train.updates or train.samples, or give its IterableDataset a __len__",
        )

    def _refuse_unrepeatable(self) -> None:
        """Raises a RecipeError if the source cannot repeat batches for ``overfit_batches``."""
        if self.recipe.train.overfit_batches is None or self.source.can_repeat():
            return
        raise recipe_error(
            self.recipe,
            "train.overfit_batches",
            f"'{self.recipe.data.kind}' has no batches that could be repeated: it needs a dataset",
        )

    def _refuse_unbalanced(self) -> None:
        """Raises a RecipeError if the source cannot draw its classes equally often."""
        data = self.recipe.data
        if getattr(data, "sampling", "random") != "balanced":
            return
        if self.source.can_balance():
            return
        raise recipe_error(
            self.recipe,
            "data.sampling",
            f"'{data.kind}' has no labels of its training samples by which they could be balanced: "
            "use random",
        )

    def _class_weights(self, model: LearnerConfig) -> torch.Tensor | None:
        """Returns the weights of classes in the loss.

        Raises:
            RecipeError: They do not fit the data.
        """
        if not isinstance(model, ClassWeightsConfig) or model.class_weights is None:
            return None
        try:
            weights = weights_of_classes(
                model.class_weights,
                self.source.class_counts(),
                self.source.sizes.get("classes"),
            )
        except ValueError as error:
            message = f"'{self.recipe.data.kind}': {error}"
            raise recipe_error(self.recipe, "model.class_weights", message) from None
        return torch.tensor(weights, device=self.device)

    def build_another_learner(self) -> Learner:
        """Builds a learner like this pipeline's, without stages and with its initial weights."""
        recipe = self.recipe
        context = Context(
            self.device,
            Slots(),
            recipe.seed,
            recipe.train.batch_size,
            recipe.optimizer,
            recipe.train.ema,
            self.source.sizes,
            self.source.tables,
            class_weights=self.context.class_weights,
        )
        learner_class = imported(recipe.model)
        model = recipe.model.recorded()
        learner: Learner = learner_class(model, self.source.shapes, context)
        configure_optimizers(recipe, learner)
        learner.start_averages()
        return learner

    def attach_to_learnt(self, stages: Mapping[str, StageConfig]) -> None:
        """Attaches stages of ``inference`` to a trained learner, in this order.

        Raises:
            UsageError: As ``assemble``.
        """
        self.reports |= {kind: StageReport(kind, active=True) for kind in stages}
        context = replace(setting_of(self.recipe, self.device), stages=stages)
        for kind, stage in stages.items():
            if self._is_active(stage, context, "inference"):
                self.stages[kind] = imported(stage)(stage)
                self._current_report = self.reports[kind]
                self.stages[kind].attach(self)

    def _is_active(
        self, stage: StageConfig, context: Setting, section: str = "optimization"
    ) -> bool:
        """Returns whether a stage has something to do here, and reports the reason if not."""
        report = self.reports[stage.kind]
        try:
            report.reason = stage.inactive(context)
        except UsageError as error:
            path = f"{section}.{stage.kind}"
            problem = Problem(last_origin(self.recipe, path), path, str(error))
            raise RecipeError([problem]) from None
        for kind in stage.requires:
            required = self.reports[kind]
            if not required.active:
                report.reason = (
                    f"it requires '{kind}', which is inactive: {required.reason}"
                )
        report.active = report.reason is None
        return report.active

    def _start_from(self, run: str) -> Start:
        """Gives the model its initial weights; a RecipeError has the reason if they do not fit."""
        # Few recipes need the search of runs.
        from runner.training.init_from import start_from

        try:
            return start_from(self.learner, run)
        except RunnerError as error:
            raise recipe_error(self.recipe, "model.init_from", str(error)) from None

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size; see ``try_batch_size``."""
        # Few recipes need child processes.
        from runner.training.batch_size_trial import try_batch_size

        count = 1 if self._processes is None else self._processes.count
        return try_batch_size(self.recipe, self.plugin_files, batch_size, count)

    @contextmanager
    def first_updates(self) -> Iterator[None]:
        """Surrounds one of the first updates; stages without an effect are then inactive."""
        assert self.watch is not None
        with self.watch.watching():
            yield
        self.watch.updates += 1
        if self.watch.updates < max(self.learner.periods().values(), default=1):
            return
        for kind, slots in self.watch.slots_by_stage.items():
            if slots and not slots & self.watch.called:
                names = f"its slot '{min(slots)}'"
                if len(slots) > 1:
                    names = f"any of its slots {', '.join(sorted(slots))}"
                self.reports[kind].active = False
                self.reports[kind].reason = f"the learner never calls {names}"
        self.watch = None

    def note(self, text: str) -> None:
        """Adds a note to the stage that prepares, or that is being attached."""
        self._current_report.notes.append(text)

    def deactivate(self, reason: str) -> None:
        """Reports that the stage that is being attached has no effect."""
        self._current_report.active = False
        self._current_report.reason = reason

    @property
    def generators(self) -> Mapping[str, torch.Generator]:
        """The random generators that exist by now, by name."""
        return self.context.generators

    @property
    def choices(self) -> Choices:
        """The tuning choices of the stage that prepares, or that is being attached."""
        return self.tuning.of(self._current_report.kind)

    def batches(self) -> Iterator[tuple[Batch, Batch]]:
        """Yields an endless sequence of batches with their noise, as updates draw them."""
        # The module imports this one.
        from runner.training.step import Step

        step = Step(self)
        while True:
            inputs = step.next()
            yield inputs
            step.count(inputs.batch)

    @property
    def is_compiled(self) -> bool:
        """Returns whether a stage compiles slots."""
        return any(self.recipe.stages[kind].traces for kind in self.stages)

    def next_batch(self, batch_size: int, progress: Progress) -> Batch | None:
        """Returns a batch on the device; None if the source has nothing to learn from yet."""
        batch = self.slots.draw(batch_size, progress)
        return None if batch is None else self.slots.transfer(batch)

    def draws_in_place(self) -> bool:
        """Returns whether ``next_batch`` only calls ``draw``: on a CPU, without a stage there."""
        slots = self.slots
        is_own = slots.next_batch == self.next_batch and slots.transfer == self.transfer
        return is_own and self.device.type == "cpu"

    def transfer(self, batch: Batch) -> Batch:
        """Moves a batch to the device; tensors that are there already stay as they are."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device), batch)

    def refuse_unread(self) -> None:
        """Raises a RecipeError if nothing has read some values by the first step.

        Such values of a recipe have no effect.
        """
        origins = self.recipe.origins
        problems = []
        for section, config in self._recorded.items():
            report = self.reports.get(section.removeprefix("optimization."))
            # A stage without an effect reports its reason.
            if report is not None and not report.active:
                continue
            for name in config.unread():
                # A recipe that a command has printed contains every default; those change nothing.
                if config.is_default(name):
                    continue
                path = f"{section}.{name}"
                origin = origins.get(path, DEFAULT)
                # The values of a lock were checked when the lock was written.
                if origin != DEFAULT and not is_lock(Path(origin.source)):
                    message = "no plugin reads this value; remove it"
                    problems.append(Problem(origin, path, message))
        if problems:
            raise RecipeError(problems)

    def state_dict(self) -> State:
        """Returns everything that training changes."""
        return {
            "learner": self.learner.complete_state(),
            "source": self.source.state_dict(),
            "progress": self.progress.state_dict(),
            "stages": {kind: stage.state_dict() for kind, stage in self.stages.items()},
            "generators": {
                name: generator.get_state()
                for name, generator in self.context.generators.items()
            },
            "batch_size": self.batch_size,
            "settings": settings_of_state(self.recipe),
            "classes": list(self.source.classes),
            "prepared": self.prepared,
            "tuning": self.tuning.data(),
            "device": self.device.type,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place.

        Raises:
            CheckpointError: The state is that of another pipeline.
        """
        if state["device"] != self.device.type:
            raise CheckpointError(
                f"the checkpoint was written on device '{state['device']}', and this is "
                f"'{self.device.type}'; resume where there is one"
            )
        # Loading replaces the settings of the optimizers by those of the checkpoint.
        configured = [
            [*map(dict, optimizer.param_groups)]
            for _, optimizer in self.learner.optimizers()
        ]
        with fitting():
            check_weights(self.learner, state["learner"])
            self.learner.load_complete_state(state["learner"])
            apply_changed_settings(
                self.learner, self.recipe, state.get("settings"), configured
            )
            self.source.load_state_dict(state["source"])
            self.progress.load_state_dict(state["progress"])
            # A stage that was switched on for the resumed run starts as in a new run.
            for kind in self.stages.keys() & state["stages"].keys():
                self.stages[kind].load_state_dict(state["stages"][kind])
            for name, saved in state["generators"].items():
                self.context.generator(name).set_state(saved.cpu())
            self.batch_size = state["batch_size"]
            self.tuning.restore(state.get("tuning", {}), self._fixed)

    def load_learnt(self, state: State) -> None:
        """Restores learner, stages and progress on any device, without what only a training needs.

        Raises:
            CheckpointError: The state is that of another pipeline.
        """
        with fitting():
            self.progress.load_state_dict(state["progress"])
            check_weights(self.learner, state["learner"])
            # A checkpoint of a finished run may have only a part of the learner's entries.
            complete_state = self.learner.state_dict() | state["learner"]
            self.learner.load_complete_state(complete_state)
            # Stages without an effect on the device of the training have no state.
            for kind in self.stages.keys() & state["stages"].keys():
                self.stages[kind].load_state_dict(state["stages"][kind])
        check_finite(self.learner)


def resolve_device(name: str) -> torch.device:
    """Returns the device of ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` on this machine.

    Raises:
        UsageError: The machine does not have this GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # Torch can select only a device that has a number.
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise UsageError(
                f"device: {name}: this machine offers {count} CUDA devices; "
                "use device: auto or cpu"
            )
    return device


def _device_of(name: str, local_rank: int) -> str:
    """Returns the device of one of several processes on this machine."""
    if ":" in name:
        raise UsageError(
            f"device: {name}: several processes would share one device; use cuda or cpu"
        )
    has_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return f"cuda:{local_rank}" if has_gpu else "cpu"


def assemble(
    recipe: Recipe,
    plugin_files: Sequence[Path] = (),
    *,
    batch_size: int | None = None,
    resumed: State | None = None,
    tuning: Tuning | None = None,
    processes: ProcessGroup | None = None,
) -> Assembly:
    """Builds the pipeline of a recipe.

    Args:
        recipe: The recipe.
        plugin_files: Files of its plugins.
        batch_size: Another batch size than the recipe's.
        resumed: State of the pipeline in a checkpoint. The batch size that a stage has selected
            stays.
        tuning: Tuning choices; those of the lock that the recipe was loaded from, if none are
            passed.
        processes: The processes that train together; None for a single one.

    Raises:
        UsageError: It cannot run here, or its tuning choices are of another machine.
    """
    name = recipe.device
    if processes is not None:
        name = _device_of(name, processes.local_rank)
    device = resolve_device(name)
    if device.type == "cuda":
        # Streams and graphs belong to the current device.
        torch.cuda.set_device(device)
    if recipe.system.deterministic:
        require_deterministic_kernels()
    size = batch_size or recipe.train.batch_size
    with located(recipe):
        return Assembly(
            recipe,
            plugin_files,
            device,
            size,
            resumed,
            tuning=tuning,
            processes=processes,
        )


def setting_of(
    recipe: Recipe,
    device: torch.device,
    kinds: Collection[str] | None = None,
    processes: int = 1,
) -> Setting:
    """Returns the context for queries of stages.

    Args:
        recipe: The recipe.
        device: The device of the training.
        kinds: The stages that the context contains; all of the recipe's by default.
        processes: Number of processes of the training.
    """
    stages = {
        kind: stage
        for kind, stage in recipe.stages.items()
        if kinds is None or kind in kinds
    }
    unit = recipe.length[0]
    return Setting(recipe.model, recipe.data, device, stages, unit, processes)
