"""What the sections of a recipe demand of each other."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from runner.api import LearnerConfig, SourceConfig, Stage
from runner.recipe.errors import DEFAULT, Place, Problem
from runner.recipe.sections import TrackingConfig, TrainConfig
from runner.recipe.source import Node

PIPELINE_SLOTS = frozenset(
    {
        "backward",
        "make_optimizer",
        "next_batch",
        "unscale",
        "optimizer_step",
        "precision",
        "sample",
        "transfer",
        "update",
    }
)
"""The slots that every pipeline has, whatever its learner."""


@dataclass
class Draft:
    """The parts of a recipe that could be validated so far."""

    root: Node
    model: LearnerConfig | None = None
    data: SourceConfig | None = None
    train: TrainConfig | None = None
    tracking: TrackingConfig | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
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
    if draft.train is None or draft.data is None:
        return
    simulates, kind = draft.data.simulates, draft.data.kind
    wanted, what = ("env_steps", "a simulator") if simulates else ("updates", "a dataset")
    given = draft.train.model_dump(exclude_none=True)  # a dump does not count as reading a setting
    if wanted not in given:
        yield Problem(draft.place("train"), f"train.{wanted}", f"is missing: '{kind}' is {what}")
    for key in TrainConfig.unused(simulates):
        if key in given and draft.node(f"train.{key}") is not None:
            message = f"means nothing here: '{kind}' is {what}, whose training is counted in '{wanted}'"
            yield Problem(draft.place(f"train.{key}"), f"train.{key}", message)
    warmup, steps = given.get("warmup_steps"), given.get("env_steps")
    if simulates and warmup is not None and steps is not None and warmup >= steps:
        message = f"{warmup:,} leaves no step to learn in: train.env_steps is {steps:,}"
        yield Problem(draft.place("train.warmup_steps"), "train.warmup_steps", message)
    largest, batch_size = draft.data.largest_batch(), given["batch_size"]
    if largest is not None and batch_size > largest:
        message = f"{batch_size:,} is more than '{kind}' can give at once: {largest:,}"
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
    model = draft.model.model_copy(deep=True)  # asking the copy does not count as reading the settings
    offered = model.slots() | PIPELINE_SLOTS
    for kind, stage in draft.stages.items():
        reasons = dict.fromkeys(model.lacks(slot) for slot in sorted((stage.claims | stage.wraps) - offered))
        for reason in reasons:
            yield Problem(draft.place(f"optimization.{kind}"), f"optimization.{kind}", f"cannot work here: {reason}")
