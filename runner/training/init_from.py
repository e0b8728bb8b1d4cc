"""Starting from the weights of another run (``model.init_from``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from runner.plugin.averages import saved_averages
from runner.plugin.learner import Learner
from runner.plugin.source import State
from runner.system.errors import UsageError
from runner.system.files import sha256
from runner.tracking.lookup import folder_of
from runner.training.checkpoint_files import MANIFEST
from runner.training.checkpoint_selection import load_chosen

_SHOWN = 4
"""Names that a message lists of each sort; the lock has them all."""


@dataclass(frozen=True)
class Start:
    """The initial weights of a model; names are ``<module>.<parameter or buffer>``."""

    run: str
    checkpoint: str
    sha256: str
    """Of its manifest, which has the digest of every file."""
    taken: int
    missing: list[str]
    """Names that are missing in the run; these stay as initialised, like those of another shape."""
    reshaped: list[str]
    """Names that have another shape in the run."""
    unused: list[str]
    """Names that the run has and this model has not."""

    def tags(self) -> dict[str, str]:
        """Returns the fields as tags of the new run."""
        values = {
            name: ", ".join(value) if isinstance(value, list) else value
            for name, value in asdict(self).items()
        }
        return {f"init_from.{name}": str(value) for name, value in values.items()}

    def remarks(self, locked: Mapping[str, Any] | None) -> list[str]:
        """Returns remarks on the weights, also if they differ from those in the
        lock that is run again.
        """
        there = f"{self.run} ({self.checkpoint})"
        sorts = {
            "not found there": self.missing,
            "of another shape there": self.reshaped,
            "left over": self.unused,
        }
        parts = [
            f"{sort}: {_shortened(names)}" for sort, names in sorts.items() if names
        ]
        said = (
            [
                f"model.init_from: {self.taken} tensors are those of {there}; {'; '.join(parts)}"
            ]
            if parts
            else []
        )
        if locked is not None and locked["sha256"] != self.sha256:
            said.append(
                f"drift: model.init_from is {there} now, and was other weights in the lock"
            )
        return said


def start_from(learner: Learner, run: str) -> Start:
    """Gives a model the weights of a run's best checkpoint, wherever module, name and shape are the same.

    Raises:
        UsageError: there is no such run, or no tensor has the same name and shape.
        CheckpointError: none of the run's checkpoints is usable.
    """
    if run == "latest":
        raise UsageError(
            "'latest' would be another run when this is trained again; name one: runner ls"
        )
    folder = folder_of(run)
    path, state = load_chosen(folder, "best")
    try:
        found = _evaluated_weights(learner, state["pipeline"]["learner"])
    except (
        KeyError,
        TypeError,
        AttributeError,
    ):  # a learner of another sort has kept it
        found = {}
    theirs, own = (
        _flat(found),
        _flat(
            {name: module.state_dict() for name, module in learner.modules().items()}
        ),
    )
    fitting = {
        name
        for name in own.keys() & theirs.keys()
        if own[name].shape == theirs[name].shape
    }
    if not fitting:
        raise UsageError(
            f"no tensor of {folder.name} has the name and shape of one of this model; name a run of such a model"
        )
    for name, module in learner.modules().items():
        taken = {
            key: value
            for key, value in found.get(name, {}).items()
            if f"{name}.{key}" in fitting
        }
        module.load_state_dict(taken, strict=False)
    return Start(
        folder.name, path.name, sha256(path / MANIFEST), len(fitting),
        missing=sorted(own.keys() - theirs.keys()),
        reshaped=sorted((own.keys() & theirs.keys()) - fitting),
        unused=sorted(theirs.keys() - own.keys()),
    )  # fmt: skip


def _evaluated_weights(
    learner: Learner, state: State
) -> Mapping[str, Mapping[str, Tensor]]:
    """The weights that the run evaluated: averages where it has them."""
    averages = saved_averages(state) or {}
    evaluated: dict[str, dict[str, Tensor]] = {}
    for name, weights in learner.weights(state).items():
        evaluated[name] = {
            key: averages.get(f"{name}.{key}", value) for key, value in weights.items()
        }
    return evaluated


def _flat(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    named = (
        (f"{name}.{key}", value)
        for name, module in modules.items()
        for key, value in module.items()
    )
    return {name: value for name, value in named if isinstance(value, Tensor)}


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
