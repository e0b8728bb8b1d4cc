"""What the sections of a recipe demand of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.plugin.progress import UNITS

if TYPE_CHECKING:
    from runner.plugin.learner import LearnerConfig
    from runner.plugin.source import SourceConfig
    from runner.plugin.stage import StageConfig
    from runner.recipe.document import Node, Problem
    from runner.recipe.sections import TrainConfig


def conflicts(
    root: Node,
    model: LearnerConfig | None,
    data: SourceConfig | None,
    train: TrainConfig | None,
    stages: Mapping[str, StageConfig],
    switched: Mapping[str, bool],
) -> Iterator[Problem]:
    """Everything that contradicts something else; parts that are not valid are None, and not judged.

    ``stages`` are those that are on and valid, in the order in which they attach; ``switched`` says of every stage that
    the recipe names whether it is on. ``root`` tells the places.
    """
    found = list(_of_length(data, train)) if train is not None else []
    if model is not None and data is not None and model.learns_from != data.provides:
        learner = f"model '{model.kind}' ({root.asked('model.kind').cited()}) learns from {model.learns_from} data"
        found.append(("data.kind", f"'{data.kind}' provides {data.provides} data, but {learner}"))
    owners: dict[str, str] = {}
    for kind, stage in stages.items():
        complaints = []
        for required in stage.requires:
            if not switched.get(required):
                where = root.asked(f"optimization.{required}").cited()
                state = f"is switched off ({where})" if required in switched else "is not switched on"
                complaints.append(f"requires '{required}', which {state}: switch it on, or '{kind}' off")
        for slot in sorted(stage.claims):
            owner = owners.setdefault(slot, kind)
            if owner != kind:
                where = root.asked(f"optimization.{owner}").cited()
                complaints.append(f"replaces '{slot}', and so does '{owner}' ({where}): switch one of them off")
        if model is not None:
            lacking = filter(None, map(model.lacks, sorted(stage.claims | stage.wraps)))
            complaints += [f"cannot work here: {reason}" for reason in dict.fromkeys(lacking)]
        found += [(f"optimization.{kind}", message) for message in complaints]
    for path, message in found:
        yield root.problem_at(path, message)


def _of_length(data: SourceConfig | None, train: TrainConfig) -> Iterator[tuple[str, str]]:
    given = [unit for unit in UNITS if getattr(train, unit) is not None]
    offered = [unit for unit in UNITS if data is None or unit in data.units]
    if not given:
        yield "train", f"does not say how long: give one of {', '.join(f'train.{unit}' for unit in offered)}"
        return
    for unit in given[1:]:
        message = f"a training is counted in one unit, and train.{given[0]} is given, too: remove one of them"
        yield f"train.{unit}", message
    if data is None:
        return
    if given[0] not in offered:
        yield f"train.{given[0]}", f"means nothing here: '{data.kind}' counts {', '.join(offered)}"
    for key, message in data.contradictions(*train.length):
        yield f"data.{key}", message
    largest = data.largest_batch()
    if largest is not None and train.batch_size > largest:
        message = f"{train.batch_size:,} is more than '{data.kind}' can give at once: {largest:,}"
        yield "train.batch_size", message
