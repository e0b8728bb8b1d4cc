"""The trained model of a run, and the pipeline for its inference."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.plugin.registry import Registry
from runner.plugin.source import State
from runner.recipe.lock import ABSENT, Drift
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.locked_recipe import load_locked
from runner.tracking.lookup import folder_of
from runner.tracking.store import Store
from runner.tracking.versions import is_version
from runner.tracking.workspace import RunFolder, Workspace
from runner.training.checkpoint_selection import Which, load_chosen
from runner.training.model_versions import fetched
from runner.training.pipeline import Assembly, assemble

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The result of a run: its recipe, its weights, and its folder.

    Attributes:
        name: Name of the run.
        recipe: Its recipe.
        registry: The plugins.
        state: State of the pipeline in a checkpoint.
        folder: Folder of the run.
        changes: Differences between its code and packages at its training and those in use.
    """

    name: str
    recipe: Recipe
    registry: Registry
    state: State
    folder: Path
    changes: tuple[str, ...] = ()

    def under(self, recipe: Recipe) -> Trained:
        """Returns the same model and data with the inference settings of another recipe.

        Raises:
            UsageError: Its model is of another kind than the run's.
        """
        kind = recipe.model.kind
        trained_kind = self.recipe.model.kind
        if kind != trained_kind:
            raise UsageError(
                f"recipe '{recipe.name}' is for model '{kind}', "
                f"and {self.name} has trained '{trained_kind}'"
            )
        combined = replace(
            self.recipe,
            name=recipe.name,
            inference=recipe.inference,
            serve=recipe.serve,
            origins=recipe.origins,
        )
        return replace(self, recipe=combined)

    def pipeline(self) -> Assembly:
        """Returns a pipeline without stages whose learner has these weights.

        The learner is in evaluation mode as long as it lives. Random numbers that a source or a
        learner draws while it is built are those of the training; the global generators of the
        program stay as they are.

        Raises:
            CheckpointError: The weights do not fit the recipe.
        """
        # The stages of the recipe are for its training.
        recipe = replace(self.recipe, stages={})
        # A program may load a model while it trains another one.
        with (
            generators.exclusive(f"loading {self.name}", nested=True),
            generators.restored(),
        ):
            generators.seed(recipe.seed)
            pipeline = assemble(recipe, self.registry.files, resumed=self.state)
            pipeline.load_learnt(self.state)
        learner = pipeline.learner
        evaluation = learner.evaluating()
        evaluation.__enter__()
        # The evaluation ends when the learner is deleted.
        vars(learner)["_evaluation"] = evaluation
        return pipeline


def trained(
    run: Path | str = "latest",
    checkpoint: Which = "best",
    sets: Sequence[str] = (),
    plugins: Sequence[Path | str | type[Any]] = (),
) -> Trained:
    """Reads the weights of a run, of a model in MLflow, or of a version of a model.

    A warning names code and packages that have changed since the training.

    Args:
        run: A run's folder, name, digits or MLflow id, ``latest``, a model (``models:/m-...``),
            ``NAME/NUMBER`` or ``NAME@ALIAS``.
        checkpoint: As for ``load_chosen``.
        sets: Assignments over the run's recipe.
        plugins: Python files with the plugins of the run, or classes of their settings.

    Raises:
        RunnerError: The run does not exist, its plugins are required as an argument, or none of its
            checkpoints is usable.
    """
    plugin_registry = Registry(plugins)
    folder = _folder(str(run))

    def hint(files: Mapping[Path, str]) -> str:
        paths = [str(path) for path in (*plugin_registry.files, *files)]
        return f"name them: plugins={paths}"

    # A model in MLflow has no record of a run.
    name = str(run) if folder.record() is None else folder.name
    lock = folder.path / LOCK_NAME
    recipe, registry, drifts = load_locked(lock, name, sets, plugin_registry, hint)
    changes = _changes(drifts)
    if changes:
        _log.warning("%s has changed since its training: %s", name, "; ".join(changes))
    _, state = load_chosen(folder, checkpoint)
    return Trained(name, recipe, registry, state["pipeline"], folder.path, changes)


def _changes(drifts: Iterable[Drift]) -> tuple[str, ...]:
    """Returns what a user may not know of: settings, and plugins that they add, are requested."""
    return tuple(
        str(drift)
        for drift in drifts
        if drift.matters and not drift.is_setting and drift.locked != ABSENT
    )


def _folder(run: str) -> RunFolder:
    if run.startswith("models:/"):
        return RunFolder(Store(Workspace(), reading=True).model(run))
    return fetched(run) if is_version(run) else folder_of(run)
