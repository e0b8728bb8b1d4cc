"""What the sections of a recipe demand of each other."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner.plugin.learner import LearnerConfig
from runner.plugin.optimizer import OptimizerSettings
from runner.plugin.progress import UNITS
from runner.plugin.source import SourceConfig
from runner.plugin.stage import StageConfig
from runner.recipe.document import DEFAULT, Node, Place, Problem
from runner.recipe.sections import TrackingConfig, TrainConfig


@dataclass
class Draft:
    """The parts of a recipe that could be validated so far."""

    root: Node
    model: LearnerConfig | None = None
    data: SourceConfig | None = None
    optimizer: dict[str, OptimizerSettings] = field(default_factory=dict)
    lr_scheduler: Any = None
    train: TrainConfig | None = None
    tracking: TrackingConfig | None = None
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stages that are on and whose settings are valid, in the order in which they attach."""
    switched: dict[str, bool] = field(default_factory=dict)
    """Every stage that the recipe names, on or off, valid or not."""

    def node(self, path: str) -> Node | None:
        """What was written at a dotted path."""
        node: Node | None = self.root
        for key in path.split("."):
            node = node.get(key) if node is not None else None
        return node

    def place(self, path: str) -> Place:
        """Where the value at a dotted path was asked for: at its key, or at the section that leaves it out."""
        while path:
            node = self.node(path)
            if node is not None:
                return node.anchor
            path = path.rpartition(".")[0]
        return self.root.place

    def origin(self, path: str) -> Place:
        """Where the value at a dotted path was written; ``default`` if nobody wrote it."""
        node = self.node(path)
        return DEFAULT if node is None else node.place


def conflicts(draft: Draft) -> Iterator[Problem]:
    """Everything that contradicts something else; parts that are missing are not judged."""
    yield from _length(draft)
    yield from _data(draft)
    yield from _requirements(draft)
    yield from _claims(draft)
    yield from _slots(draft)


def _length(draft: Draft) -> Iterator[Problem]:
    if draft.train is None:
        return
    train, data = draft.train, draft.data
    given = [unit for unit in UNITS if getattr(train, unit) is not None]
    offered = [unit for unit in UNITS if data is None or unit in data.units]
    if not given:
        one_of = ", ".join(f"train.{unit}" for unit in offered)
        yield Problem(draft.place("train"), "train", f"does not say how long: give one of {one_of}")
    for unit in given[1:]:
        message = f"a training is counted in one unit, and train.{given[0]} is given, too: remove one of them"
        yield Problem(draft.place(f"train.{unit}"), f"train.{unit}", message)
    if data is None or not given:
        return
    for unit in given[:1]:
        if unit not in offered:
            message = f"means nothing here: '{data.kind}' counts {', '.join(offered)}"
            yield Problem(draft.place(f"train.{unit}"), f"train.{unit}", message)
    for key, message in data.contradictions(*train.length):
        yield Problem(draft.place(f"data.{key}"), f"data.{key}", message)
    largest = data.largest_batch()
    if largest is not None and train.batch_size > largest:
        message = f"{train.batch_size:,} is more than '{data.kind}' can give at once: {largest:,}"
        yield Problem(draft.place("train.batch_size"), "train.batch_size", message)


def _data(draft: Draft) -> Iterator[Problem]:
    model, data = draft.model, draft.data
    if model is not None and data is not None and model.learns_from != data.provides:
        learner = f"model '{model.kind}' ({draft.place('model.kind').cited()}) learns from {model.learns_from} data"
        message = f"'{data.kind}' provides {data.provides} data, but {learner}"
        yield Problem(draft.place("data.kind"), "data.kind", message)


def _requirements(draft: Draft) -> Iterator[Problem]:
    for kind, stage in draft.stages.items():
        for required in stage.requires:
            if draft.switched.get(required):
                continue
            path = f"optimization.{required}"
            state = (
                f"is switched off ({draft.place(path).cited()})" if required in draft.switched else "is not switched on"
            )
            message = f"requires '{required}', which {state}: switch it on, or '{kind}' off"
            yield Problem(draft.place(f"optimization.{kind}"), f"optimization.{kind}", message)


def _claims(draft: Draft) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    for kind, stage in draft.stages.items():
        for slot in sorted(stage.claims):
            owner = owners.setdefault(slot, kind)
            if owner != kind:
                where = draft.place(f"optimization.{owner}").cited()
                message = f"replaces '{slot}', and so does '{owner}' ({where}): switch one of them off"
                yield Problem(draft.place(f"optimization.{kind}"), f"optimization.{kind}", message)


def _slots(draft: Draft) -> Iterator[Problem]:
    if draft.model is None:
        return
    for kind, stage in draft.stages.items():
        lacking = (draft.model.lacks(slot) for slot in sorted(stage.claims | stage.wraps))
        for reason in dict.fromkeys(filter(None, lacking)):
            yield Problem(draft.place(f"optimization.{kind}"), f"optimization.{kind}", f"cannot work here: {reason}")
