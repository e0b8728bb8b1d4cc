"""Starting from the weights of another run (``model.init_from``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from runner.plugin.averages import saved_averages
from runner.plugin.learner import Learner
from runner.plugin.module_state import copied_state, load_module
from runner.plugin.source import State
from runner.system.errors import UsageError
from runner.system.files import sha256
from runner.tracking.lookup import folder_of
from runner.training.checkpoint_files import MANIFEST
from runner.training.checkpoint_selection import load_chosen

# The lock has all names; a message has only this number of them.
_SHOWN = 4


@dataclass(frozen=True)
class Start:
    """The initial weights of a model.

    Names are ``<module>.<parameter or buffer>``. The fields are stored in the lock.

    Attributes:
        run: The run whose weights they are.
        checkpoint: Its checkpoint.
        sha256: Digest of the checkpoint's manifest, which has the digest of every file.
        taken: Number of tensors that are the run's.
        missing: Names that are missing in the run; these tensors stay as initialised, like those of
            another shape.
        reshaped: Names that have another shape in the run.
        unused: Names of the run that this model does not have.
    """

    run: str
    checkpoint: str
    sha256: str
    taken: int
    missing: list[str]
    reshaped: list[str]
    unused: list[str]

    def tags(self) -> dict[str, str]:
        """Returns the fields as tags of the new run."""
        tags = {}
        for name, value in asdict(self).items():
            text = ", ".join(value) if isinstance(value, list) else str(value)
            tags[f"init_from.{name}"] = text
        return tags

    def remarks(self, locked: Mapping[str, Any] | None) -> list[str]:
        """Returns remarks on the weights, and on differences from those in a lock.

        Args:
            locked: The weights in the lock that is run again, if one is.
        """
        source = f"{self.run} ({self.checkpoint})"
        names_by_reason = {
            "not found there": self.missing,
            "of another shape there": self.reshaped,
            "left over": self.unused,
        }
        exceptions = [
            f"{reason}: {_shortened(names)}"
            for reason, names in names_by_reason.items()
            if names
        ]
        remarks = []
        if exceptions:
            remarks.append(
                f"model.init_from: {self.taken} tensors are those of {source}; "
                f"{'; '.join(exceptions)}"
            )
        # The lock of a run has the digest of the weights that it started from.
        if locked is not None and locked["sha256"] != self.sha256:
            remarks.append(
                f"drift: model.init_from is {source} now, "
                "and was other weights in the lock"
            )
        return remarks


def start_from(learner: Learner, run: str) -> Start:
    """Gives a model the weights of a run's best checkpoint.

    A tensor is used if its module, name and shape are the same.

    Raises:
        UsageError: The run does not exist, or no tensor has the same name and shape.
        CheckpointError: None of the run's checkpoints is usable.
    """
    # A recipe should describe the same training every time.
    if run == "latest":
        raise UsageError(
            "'latest' would be another run when this is trained again; "
            "name one: runner ls"
        )
    folder = folder_of(run)
    path, state = load_chosen(folder, "best")
    # A learner of another kind may have stored the checkpoint.
    try:
        source = _evaluated_weights(learner, state["pipeline"]["learner"])
    except (KeyError, TypeError, AttributeError):
        source = {}
    modules = learner.modules()
    stored = _flat(source)
    initial = _flat({name: module.state_dict() for name, module in modules.items()})
    common = initial.keys() & stored.keys()
    fitting = {name for name in common if initial[name].shape == stored[name].shape}
    if not fitting:
        raise UsageError(
            f"no tensor of {folder.name} has the name and shape of one of this model; "
            "name a run of such a model"
        )
    for name, module in modules.items():
        weights = source.get(name, {})
        # Other tensors stay as initialised.
        for key in [key for key in weights if f"{name}.{key}" not in fitting]:
            del weights[key]
        load_module(module, weights, strict=False)
    return Start(
        run=folder.name,
        checkpoint=path.name,
        sha256=sha256(path / MANIFEST),
        taken=len(fitting),
        missing=sorted(initial.keys() - stored.keys()),
        reshaped=sorted(common - fitting),
        unused=sorted(stored.keys() - initial.keys()),
    )


def _evaluated_weights(learner: Learner, state: State) -> dict[str, dict[str, Tensor]]:
    """Returns the weights that the run evaluated: averages where it has them."""
    averages = saved_averages(state) or {}
    evaluated: dict[str, dict[str, Tensor]] = {}
    for name, weights in learner.weights(state).items():
        evaluated[name] = copied_state(weights)
        for key in weights:
            if f"{name}.{key}" in averages:
                evaluated[name][key] = averages[f"{name}.{key}"]
    return evaluated


def _flat(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the tensors of all modules by ``<module>.<name>``."""
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in module.items()
        if isinstance(value, Tensor)
    }


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text
