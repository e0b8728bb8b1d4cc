"""Assembles the learner, source and stages of a recipe into a pipeline that is ready to train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.child.spawn import Cause, Child, ChildError
from runner.plugin.configs import Setting, SourceConfig, StageConfig
from runner.plugin.context import STEP, Context, Slots
from runner.plugin.learner import Learner
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, Source, State
from runner.plugin.stage import Probe
from runner.plugin.static_checks import imported
from runner.plugin.tuning import Choices, Tuning
from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import DEFAULT, Problem, RecipeError, is_lock
from runner.system.errors import CheckpointError, RunnerError, UsageError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import map_tensors
from runner.system.torch_settings import require_deterministic_kernels
from runner.training.resuming import (
    apply_changed_settings,
    refuse_other_classes,
    settings_of_state,
)
from runner.training.stage_watch import StageReport, Watch
from runner.training.state_schema import check_finite, check_weights, fitting
from runner.training.tuning import tuning_of

if TYPE_CHECKING:
    from runner.training.init_from import Start


class Assembly:
    """A learner, a source and the active stages around one set of slots."""

    folder: Path | None = None
    """Where stages keep what they make of a finished run."""

    def __init__(
        self, recipe: Recipe, plugin_files: Sequence[Path], device: torch.device, batch_size: int,
        resumed: State | None, build_source: Callable[[Any, Context], Source] | None = None,
        tuning: Tuning | None = None,
    ) -> None:  # fmt: skip
        """Lets stages prepare, builds learner and source (or another source), attaches stages, makes optimizers."""
        self.recipe, self.plugin_files, self.device, self.batch_size = (
            recipe,
            plugin_files,
            device,
            batch_size,
        )
        self.shapes_vary = recipe.data.shapes_vary
        self.reports = {kind: StageReport(kind, active=True) for kind in recipe.stages}
        setting = setting_of(recipe, device)
        active = {
            kind: stage
            for kind, stage in recipe.stages.items()
            if self._is_active(stage, setting)
        }
        source, learner = (
            build_source or imported(recipe.data),
            imported(recipe.model),
        )  # before anything is built
        self.stages = {
            kind: imported(stage)(stage.recorded()) for kind, stage in active.items()
        }
        self.tuning = tuning_of(recipe, device) if tuning is None else tuning
        self._fixed = frozenset(
            kind for kind, stage in active.items() if stage.prepares
        )
        """Stages whose choices cannot change after the first update."""
        self.prepared = self._prepare(resumed)
        """Notes of stages about the batch size, which a resumed run keeps."""

        self.slots, train = Slots(), recipe.train
        self.context = Context(
            device,
            self.slots,
            recipe.seed,
            train.batch_size,
            recipe.optimizer,
            train.ema,
        )
        model, data = recipe.model.recorded(), self._adapted(recipe.data).recorded()
        self.source: Source = source(data, self.context)
        if resumed is not None:
            refuse_other_classes(resumed.get("classes"), self.source.classes)
        self.context.sizes, self.context.tables = self.source.sizes, self.source.tables
        self.context.classes = tuple(self.source.classes)
        outside = STEP | vars(self.slots).keys()
        self.learner: Learner = learner(model, self.source.shapes, self.context)
        first = recipe.model.init_from if resumed is None else None
        self.start = None if first is None else self._start_from(first)
        self.progress = Progress(
            *recipe.length, self.source.epoch_samples(self.batch_size)
        )
        self.context.progress = self.progress
        self._refuse_unknown_epochs()
        self._define_steps()
        watch = Watch(self.slots, outside | recipe.model.answering)
        for kind, stage in self.stages.items():
            self._speaking = self.reports[kind]
            with watch.attaching(
                active[kind], self.reports[kind], self.learner.compilable
            ):
                stage.attach(self)
        self.undeclared = watch.undeclared
        with watch.watching():
            self.learner.configure_optimizers()
        self.learner.start_averages()
        self.base_rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for _, optimizer in self.learner.optimizers()
        ]
        """Learning rate of every parameter group before any schedule, by optimizer."""
        self._refuse_unmade()
        self.watch = watch if any(watch.held.values()) else None
        """There until the first updates are over."""
        self.source.bind(self.learner)
        # A stage that prepared the run is not asked again when the run is resumed, and its settings
        # were read before.
        asked = {
            kind: stage
            for kind, stage in self.stages.items()
            if resumed is None or not active[kind].prepares
        }
        self._recorded = {
            f"optimization.{kind}": stage.config for kind, stage in asked.items()
        }
        self._recorded |= {"model": model, "data": data}

    def _prepare(self, resumed: State | None) -> dict[str, list[str]]:
        """Lets stages change what is built, or restores what they have changed; returns their notes."""
        if resumed is None:
            for kind, stage in self.stages.items():
                self._speaking = self.reports[kind]
                stage.prepare(self)
        else:
            self.batch_size = resumed["batch_size"]
            self.tuning.restore(resumed.get("tuning", {}), self._fixed)
            # A changed recipe may have switched one off.
            for kind in resumed["prepared"].keys() & self.reports.keys():
                self.reports[kind].notes += resumed["prepared"][kind]
        return {
            kind: list(report.notes)
            for kind, report in self.reports.items()
            if report.notes
        }

    def _adapted(self, data: SourceConfig) -> SourceConfig:
        """Returns the settings of the source as the stages have changed them."""
        for stage in self.stages.values():
            data = stage.adapt_source(data)
        return data

    def _define_steps(self) -> None:
        """Defines the slots of a training step; a RunnerError if source or learner has taken one of them."""
        taken = STEP & vars(self.slots).keys()
        if taken:
            owners = f"{type(self.source).__name__} or {type(self.learner).__name__}"
            raise RunnerError(
                f"{owners} defines the slot '{min(taken)}', which is the runner's: use another name"
            )
        update = (
            self.learner.update
            if self.recipe.train.ema is None
            else self.learner.averaged_update
        )
        self.slots.define(
            draw=self.source.draw,
            transfer=self.transfer,
            next_batch=self.next_batch,
            update=update,
        )

    def _refuse_unknown_epochs(self) -> None:
        """Raises a RecipeError if the training is counted in epochs, and the source does not report their length."""
        if self.progress.unit != "epochs" or self.progress.epoch_samples is not None:
            return
        problem = f"'{self.recipe.data.kind}' does not report how long an epoch is"
        hint = (
            "use train.updates or train.samples, or give its IterableDataset a __len__"
        )
        path = "train.epochs"
        raise RecipeError(
            [
                Problem(
                    self.recipe.origins.get(path, DEFAULT), path, f"{problem}: {hint}"
                )
            ]
        )

    def _refuse_unmade(self) -> None:
        """Raises a RunnerError if a role has settings, and no optimizer reads them: its module would stay as it is."""
        unmade = self.context.optimizers.keys() - {
            name for name, _ in self.learner.optimizers()
        }
        if unmade:
            learner, config, role = (
                type(self.learner).__name__,
                type(self.recipe.model).__name__,
                min(unmade),
            )
            made = f"make it with self.role('{role}', module) in {method_named(self.learner, '__init__')}"
            raise RunnerError(
                f"{config}.roles names '{role}', which {learner} never makes: {made}, or remove the name"
            )

    def build_another_learner(self) -> Learner:
        """Builds a learner like this pipeline's, without stages and with its initial weights."""
        train = self.recipe.train
        context = Context(
            self.device, Slots(), self.recipe.seed, train.batch_size, self.recipe.optimizer, train.ema,
            self.source.sizes, self.source.tables,
        )  # fmt: skip
        model = self.recipe.model
        learner: Learner = imported(model)(
            model.recorded(), self.source.shapes, context
        )
        learner.configure_optimizers()
        learner.start_averages()
        return learner

    def attach_to_learnt(self, stages: Mapping[str, StageConfig]) -> None:
        """Attaches stages of ``inference`` to a learner that has its weights, in this order; raises as ``assemble``."""
        self.reports |= {kind: StageReport(kind, active=True) for kind in stages}
        setting = replace(setting_of(self.recipe, self.device), stages=stages)
        for kind, stage in stages.items():
            if self._is_active(stage, setting, "inference"):
                self.stages[kind] = imported(stage)(stage)
                self._speaking = self.reports[kind]
                self.stages[kind].attach(self)

    def _is_active(
        self, stage: StageConfig, setting: Setting, section: str = "optimization"
    ) -> bool:
        report, recipe = self.reports[stage.kind], self.recipe
        try:
            report.reason = stage.inactive(setting)
        except UsageError as error:
            path = f"{section}.{stage.kind}"
            # The last of the places that influence the stage: --set wins over the file, and the
            # file over what it extends.
            places = [
                place
                for each, place in recipe.origins.items()
                if f"{each}.".startswith(f"{path}.")
            ]
            written = [each for each in places if each != DEFAULT]
            last = max(
                written,
                key=lambda at: (isinstance(at.source, str), at.source == recipe.path),
                default=DEFAULT,
            )
            raise RecipeError([Problem(last, path, str(error))]) from None
        for other in stage.requires:
            if not self.reports[other].active:
                report.reason = f"it requires '{other}', which is inactive: {self.reports[other].reason}"
        report.active = report.reason is None
        return report.active

    def _start_from(self, run: str) -> Start:
        """Gives the model its initial weights; a RecipeError contains the reason
        if that is impossible.
        """
        from runner.training.init_from import (
            start_from,
        )  # searches runs, which few recipes need

        try:
            return start_from(self.learner, run)
        except RunnerError as error:
            path = "model.init_from"
            raise RecipeError(
                [Problem(self.recipe.origins.get(path, DEFAULT), path, str(error))]
            ) from None

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size in a child process; None if memory does not suffice there."""
        largest = self.recipe.data.largest_batch()
        if largest is not None and batch_size > largest:
            return None
        stages = {
            kind: stage
            for kind, stage in self.recipe.stages.items()
            if not stage.prepares
        }
        try:
            with Child(
                "runner.training.batch_size_probe", replace(self.recipe, stages=stages), plugin_files=self.plugin_files,
                options={"batch_size": batch_size},
            ) as child:  # fmt: skip
                return Probe(**child.answer())
        except ChildError as error:
            if error.cause in (
                Cause.OUT_OF_MEMORY,
                Cause.CRASHED,
            ):  # refused by torch, or killed by the kernel
                return None
            raise UsageError(
                f"a trial with batch size {batch_size} failed: {error}"
            ) from error

    @contextmanager
    def first_updates(self) -> Iterator[None]:
        """Entered around one of the first updates; after them, stages that did nothing are reported as inactive."""
        assert self.watch is not None
        with self.watch.watching():
            yield
        self.watch.updates += 1
        if self.watch.updates < max(self.learner.periods().values(), default=1):
            return
        for kind, held in self.watch.held.items():
            if held and not held & self.watch.called:
                slots = (
                    f"any of its slots {', '.join(sorted(held))}"
                    if len(held) > 1
                    else f"its slot '{min(held)}'"
                )
                self.reports[kind].active, self.reports[kind].reason = (
                    False,
                    f"the learner never calls {slots}",
                )
        self.watch = None

    def note(self, text: str) -> None:
        """Adds a note to the stage that prepares, or that is being attached."""
        self._speaking.notes.append(text)

    @property
    def choices(self) -> Choices:
        """The tuning choices of the stage that prepares, or that is being attached."""
        return self.tuning.of(self._speaking.kind)

    def batches(self) -> Iterator[tuple[Batch, Batch]]:
        """Batches without end, each with its noise, as updates draw them."""
        from runner.training.step import Step  # imports this module

        step = Step(self)
        while True:
            drawn = step.next()
            yield drawn
            step.count(drawn.batch)

    def next_batch(self, batch_size: int, progress: Progress) -> Batch | None:
        """A batch on the device, or None if the source has nothing to learn from yet."""
        batch = self.slots.draw(batch_size, progress)
        return None if batch is None else self.slots.transfer(batch)

    def transfer(self, batch: Batch) -> Batch:
        """Moves a batch to the device; tensors that are there already stay as they are."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device), batch)

    def refuse_unread(self) -> None:
        """Raises a RecipeError if a recipe sets values that nothing has read by the first step: they have no effect."""
        unread = [
            f"{section}.{path}"
            for section, config in self._recorded.items()
            for path in config.unread()
            # A recipe that a command has printed contains every default; those change nothing, read or not.
            if not config.is_default(path)
        ]
        places = {path: self.recipe.origins.get(path, DEFAULT) for path in unread}
        # The values of a lock were checked when the lock was written.
        written = [
            path
            for path, place in places.items()
            if place != DEFAULT and not is_lock(Path(place.source))
        ]
        if written:
            message = "no plugin reads this value; remove it"
            raise RecipeError(
                [Problem(self.recipe.origins[path], path, message) for path in written]
            )

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
        """Restores what ``state_dict`` returned, in place; a CheckpointError if it is that of another pipeline."""
        if state["device"] != self.device.type:
            where = f"on device '{state['device']}', and this is '{self.device.type}'"
            raise CheckpointError(
                f"the checkpoint was written {where}; resume where there is one"
            )
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
            # stages without effect on that device are missing
            self.learner.load_complete_state(
                self.learner.state_dict() | state["learner"]
            )
            for kind in (
                self.stages.keys() & state["stages"].keys()
            ):  # others had nothing to do on that device
                self.stages[kind].load_state_dict(state["stages"][kind])
        check_finite(self.learner)


def resolve_device(name: str) -> torch.device:
    """Returns the device of ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` on this machine; raises a
    UsageError if there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(
        "cuda:0" if name == "cuda" else name
    )  # torch selects only what has a number
    if device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"device: {name}: this machine offers {count} CUDA devices; use device: auto or cpu"
        )
    return device


def assemble(
    recipe: Recipe, plugin_files: Sequence[Path] = (), *, batch_size: int | None = None,
    resumed: State | None = None, tuning: Tuning | None = None,
) -> Assembly:  # fmt: skip
    """Builds the pipeline of a recipe.

    Args:
        recipe: The recipe.
        plugin_files: Files of its plugins.
        batch_size: Another batch size than the recipe's.
        resumed: State of the pipeline in a checkpoint. The batch size that a stage has selected stays.
        tuning: Tuning choices; those of the lock that the recipe was loaded from, if none are passed.

    Raises:
        UsageError: It cannot run here, or its tuning choices are of another machine.
    """
    device = resolve_device(recipe.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs belong to the current device
    if recipe.system.deterministic:
        require_deterministic_kernels()
    size = batch_size or recipe.train.batch_size
    return Assembly(recipe, plugin_files, device, size, resumed, tuning=tuning)


def setting_of(
    recipe: Recipe, device: torch.device, kinds: Collection[str] | None = None
) -> Setting:
    """Returns the context for queries of stages, with all stages of the recipe or
    only the given ones.
    """
    stages = {
        kind: stage
        for kind, stage in recipe.stages.items()
        if kinds is None or kind in kinds
    }
    return Setting(recipe.model, recipe.data, device, stages, recipe.length[0])
