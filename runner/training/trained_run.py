"""The trained model of a run, and the pipeline for its inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.plugin.registry import Registry
from runner.plugin.source import State
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


@dataclass(frozen=True)
class Trained:
    """The result of a run: its recipe, its weights, and its folder."""

    name: str
    recipe: Recipe
    registry: Registry
    state: State
    """Of the pipeline."""
    folder: Path

    def under(self, recipe: Recipe) -> Trained:
        """Returns the same weights, model and data with the inference and serving
        settings of another recipe.

        Raises:
            UsageError: its model is of another kind than the run's.
        """
        mine, theirs = recipe.model.kind, self.recipe.model.kind
        if mine != theirs:
            raise UsageError(
                f"recipe '{recipe.name}' is for model '{mine}', and {self.name} has trained '{theirs}'"
            )
        name, origins = recipe.name, recipe.origins
        own = replace(
            self.recipe,
            name=name,
            inference=recipe.inference,
            serve=recipe.serve,
            origins=origins,
        )
        return replace(self, recipe=own)

    def pipeline(self) -> Assembly:
        """A pipeline without stages whose learner has these weights and is in evaluation mode as long as it lives.

        Raises:
            CheckpointError: the weights do not fit the recipe.
        """
        with generators.exclusive(f"loading {self.name}", nested=True):
            pipeline = assemble(
                replace(self.recipe, stages={}), self.registry.files, resumed=self.state
            )
            pipeline.load_learnt(self.state)
        learner = pipeline.learner
        evaluation = learner.evaluating()
        evaluation.__enter__()
        vars(learner)["_evaluation"] = evaluation  # ends when the learner is deleted
        return pipeline


def trained(
    run: Path | str = "latest",
    checkpoint: Which = "best",
    sets: Sequence[str] = (),
    plugins: Sequence[Path | str | type[Any]] = (),
) -> Trained:
    """Finds a run, a model that MLflow keeps (``models:/m-...``) or a version of one, and reads its weights.

    Args:
        run: a run's folder, name, digits or MLflow id, ``latest``, a model, ``NAME/NUMBER`` or ``NAME@ALIAS``.
        checkpoint: as for ``load_chosen``.
        sets: assignments over the run's recipe.
        plugins: Python files with the plugins of the run, or classes of their settings.

    Raises:
        RunnerError: there is no such run, its plugins are required as an argument, or none of its
            checkpoints is usable.
    """
    given = Registry(plugins)
    folder = _folder(str(run))

    def remedy(files: Mapping[Path, str]) -> str:
        return f"name them: plugins={[str(path) for path in (*given.files, *files)]}"

    name = str(run) if folder.record() is None else folder.name
    recipe, registry = load_locked(folder.path / LOCK_NAME, name, sets, given, remedy)
    _, state = load_chosen(folder, checkpoint)
    return Trained(name, recipe, registry, state["pipeline"], folder.path)


def _folder(run: str) -> RunFolder:
    if run.startswith("models:/"):
        return RunFolder(Store(Workspace(), reading=True).model(run))
    return fetched(run) if is_version(run) else folder_of(run)
