"""From a recipe to learner, source and stages that are ready to train."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from runner.child.spawn import Cause, Child, ChildError
from runner.plugin.context import Context, Slots
from runner.plugin.progress import Progress
from runner.plugin.stage import Probe, Setting
from runner.recipe.document import DEFAULT, Problem, RecipeError
from runner.system.errors import CheckpointError, UsageError
from runner.system.tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from runner.plugin.learner import Learner
    from runner.plugin.source import Batch, Source, State
    from runner.plugin.stage import Stage, StageConfig
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
class Preparation:
    """What is about to be built; ``batch_autotune`` changes it before anything is."""

    recipe: Recipe
    plugin_files: Sequence[Path]
    batch_size: int
    reports: dict[str, StageReport]
    preparing: str = ""

    def probe(self, batch_size: int) -> Probe | None:
        """Trains a few steps with that batch size in a child process; None if memory does not suffice there."""
        largest = self.recipe.data.largest_batch()
        if largest is not None and batch_size > largest:
            return None
        stages = {kind: stage for kind, stage in self.recipe.stages.items() if not stage.prepares}
        try:
            with Child(
                "runner.train.probe", replace(self.recipe, stages=stages), plugin_files=self.plugin_files,
                options={"batch_size": batch_size},
            ) as child:  # fmt: skip
                return Probe(**child.answer())
        except ChildError as error:
            if error.cause in (Cause.OUT_OF_MEMORY, Cause.CRASHED):  # refused by torch, or killed by the kernel
                return None
            raise UsageError(f"a trial with batch size {batch_size} failed: {error}") from error

    def note(self, text: str) -> None:
        """Adds a note to the stage that is being prepared."""
        self.reports[self.preparing].notes.append(text)


class Watch:
    """Remembers which of the slots that stages hold are called: one whose slots nobody calls has nothing to do.

    Its wrappers are the outermost while they are there, and nothing of it stays. None is there when a slot that is
    traced (compiled) is called: what is called inside cannot be seen then, and is believed to be.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.held: dict[str, frozenset[str]] = {}
        """Slots by stage."""
        self.called: set[str] = set()
        self.updates = 0
        self._traced: set[str] = set()
        self._covered: dict[str, Any] = {}

    @contextmanager
    def attaching(self, stage: StageConfig) -> Iterator[None]:
        """Sees which slots the stage takes hold of inside the ``with``."""
        before = dict(vars(self.slots))
        yield
        taken = {name for name, step in vars(self.slots).items() if step is not before.get(name)}
        if stage.traces:
            self._traced |= taken
        works_through = taken if stage.works_through is None else stage.works_through
        own = {"draw", "transfer", "next_batch", "update"}  # the training step calls these itself
        self.held[stage.kind] = frozenset(works_through - own)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what is called inside the ``with``."""
        for name in frozenset().union(*self.held.values()) - self.called:
            self._covered[name] = getattr(self.slots, name)
            vars(self.slots)[name] = partial(self._seen, name, self._covered[name])
        try:
            yield
        finally:
            self._uncover()

    def _seen(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.called.add(name)
        if name in self._traced:
            self.called |= self._covered.keys() - {"make_optimizer"}  # which is called before the first update
            self._uncover()
        return step(*args, **kwargs)

    def _uncover(self) -> None:
        vars(self.slots).update(self._covered)
        self._covered.clear()


class Assembly:
    """One learner, one source and the active stages around one set of slots."""

    def __init__(self, plan: Preparation, stages: Mapping[str, Stage], device: torch.device) -> None:
        """Builds learner and source, attaches stages in the order given, then makes the optimizers."""
        self.recipe = recipe = plan.recipe
        self.device, self.slots = device, Slots()
        batch_size, ema = recipe.train.batch_size, recipe.train.ema
        self.context = Context(device, self.slots, recipe.seed, batch_size, recipe.optimizer, ema)
        self.batch_size = plan.batch_size
        self.reports = plan.reports
        self.prepared = {kind: list(report.notes) for kind, report in plan.reports.items() if report.notes}
        """What stages have said about their choices (a batch size), which a resumed run must not make again."""
        self.shapes_vary = recipe.data.shapes_vary
        self.stages: dict[str, Stage] = {}
        self._attaching = ""
        self._recorded = {"model": recipe.model.recorded(), "data": recipe.data.recorded()}
        model, data = self._recorded["model"], self._recorded["data"]
        self.source: Source = recipe.data.implementation()(data, self.context)
        self.context.sizes = self.source.sizes
        self.learner: Learner = recipe.model.implementation()(model, self.source.shapes, self.context)
        unit, length = recipe.length
        self.progress = Progress(unit, length, self.source.epoch_samples(self.batch_size))
        self.slots.define(
            draw=self.source.draw, transfer=self.transfer, next_batch=self.next_batch, update=self.learner.update
        )
        watch = Watch(self.slots)
        for kind, stage in stages.items():
            self._attaching = kind
            self._recorded[f"optimization.{kind}"] = stage.config
            with watch.attaching(recipe.stages[kind]):
                stage.attach(self)
            self.stages[kind] = stage
        with watch.watching():
            self.learner.configure_optimizers()
        self.watch = watch if any(watch.held.values()) else None
        """There until the first updates are over."""
        self.source.bind(self.learner)

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
                slots = f"any of its slots {', '.join(sorted(held))}" if len(held) > 1 else f"its slot '{min(held)}'"
                self.reports[kind].active, self.reports[kind].reason = False, f"the learner never calls {slots}"
        self.watch = None

    def note(self, text: str) -> None:
        """Adds a note to the stage that is being attached."""
        self.reports[self._attaching].notes.append(text)

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
        """Raises a RecipeError if somebody wrote values that nobody has read by the first step: they do nothing."""
        unread = [path for section, config in self._recorded.items() for path in config.unread(f"{section}.")]
        written = [path for path in unread if self.recipe.origins.get(path, DEFAULT) != DEFAULT]
        if written:
            said = "no plugin reads this value; remove it"
            raise RecipeError([Problem(self.recipe.origins[path], path, said) for path in written])

    def state_dict(self) -> State:
        """Everything that training changes."""
        return {
            "learner": self.learner.state_dict(),
            "source": self.source.state_dict(),
            "progress": self.progress.state_dict(),
            "stages": {kind: stage.state_dict() for kind, stage in self.stages.items()},
            "generators": {name: generator.get_state() for name, generator in self.context.generators.items()},
            "batch_size": self.batch_size,
            "prepared": self.prepared,
            "device": self.device.type,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned, in place; a CheckpointError if it is that of another pipeline."""
        if state["device"] != self.device.type:
            where = f"on device '{state['device']}', and this is '{self.device.type}'"
            raise CheckpointError(f"the checkpoint was written {where}; resume where there is one")
        try:
            self.learner.load_state_dict(state["learner"])
            self.source.load_state_dict(state["source"])
            self.progress.load_state_dict(state["progress"])
            for kind, stage in self.stages.items():
                stage.load_state_dict(state["stages"][kind])
            for name, saved in state["generators"].items():
                self.context.generator(name).set_state(saved.cpu())
            self.batch_size = state["batch_size"]
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:  # torch's for shapes and names
            raise CheckpointError(f"the checkpoint does not fit this recipe: {error}") from error


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` means here; a UsageError if there is no such GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda:0" if name == "cuda" else name)  # torch selects only what has a number
    if device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise UsageError(f"device: {name}: this machine offers {count} CUDA devices; use device: auto or cpu")
    return device


def assemble(
    recipe: Recipe, plugin_files: Sequence[Path] = (), *, batch_size: int | None = None, resumed: State | None = None
) -> Assembly:
    """Builds the pipeline of a recipe, with another batch size if one is given.

    ``resumed`` is the pipeline's state in a checkpoint: what stages have chosen before (the batch size) stays chosen.

    Raises:
        UsageError: a stage must not run here, or a value of the recipe is read by nobody.
    """
    device = resolve_device(recipe.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs belong to the current device
    setting = setting_of(recipe, device)
    reports = {kind: StageReport(kind, active=True) for kind in recipe.stages}
    active = [kind for kind, stage in recipe.stages.items() if _is_active(stage, setting, reports, recipe)]
    works = {kind: recipe.stages[kind].implementation()(recipe.stages[kind].recorded()) for kind in active}

    plan = Preparation(recipe, plugin_files, batch_size or recipe.train.batch_size, reports)
    if resumed is not None:
        plan.batch_size = resumed["batch_size"]
        for kind, notes in resumed["prepared"].items():
            if kind in reports:  # a drifted recipe may have switched it off
                reports[kind].notes += notes
        for kind, stage in works.items():
            if recipe.stages[kind].prepares:
                dict(stage.config)  # read before, and not now: what prepares a run is not asked again
    else:
        for kind, stage in works.items():
            plan.preparing = kind
            stage.prepare(plan)
    return Assembly(plan, works, device)


def setting_of(recipe: Recipe, device: torch.device, kinds: Collection[str] | None = None) -> Setting:
    """What stages are asked about, with all of the recipe's stages or only these."""
    stages = {kind: stage for kind, stage in recipe.stages.items() if kinds is None or kind in kinds}
    return Setting(recipe.model, recipe.data, device, stages, recipe.length[0])


def _is_active(stage: StageConfig, setting: Setting, reports: dict[str, StageReport], recipe: Recipe) -> bool:
    report = reports[stage.kind]
    try:
        report.reason = stage.inactive(setting)
    except UsageError as error:
        path = f"optimization.{stage.kind}"
        # Of the places that have a say in the stage, the one that came last: --set, the file, what it extends.
        places = [place for each, place in recipe.origins.items() if f"{each}.".startswith(f"{path}.")]
        written = [each for each in places if each != DEFAULT]
        place = max(written, key=lambda at: (isinstance(at.source, str), at.source == recipe.path), default=DEFAULT)
        raise RecipeError([Problem(place, path, str(error))]) from None
    for other in stage.requires:
        if not reports[other].active:
            report.reason = f"it requires '{other}', which is inactive: {reports[other].reason}"
    report.active = report.reason is None
    return report.active
