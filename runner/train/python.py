"""The runner from Python: as thin as the command line, for scripts and notebooks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import LOCK_NAME
from runner.system.errors import CheckpointError
from runner.tracking import RunFolder, workspace
from runner.tracking.workspace import find
from runner.train.assemble import assemble
from runner.train.checkpoint import reader
from runner.train.run import RunResult, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.plugin.learner import Learner

PathLike = str | Path


class _Silent:
    def advance(self, step: int, metrics: dict[str, float]) -> None: ...


def train(
    recipe: PathLike,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    *,
    plugins: Sequence[PathLike] = (),
) -> RunResult:
    """Trains a recipe and logs it to MLflow, as ``runner run`` does.

    Args:
        recipe: a recipe file, the lock of a run, or the name of a recipe that ships.
        set: values that override the recipe's, by dotted path.
        plugins: Python files with plugins.

    Returns:
        Metrics, run id, folder and more. Interrupted, its ``status`` is ``KILLED``, and ``resume`` is the command that
        goes on.

    Raises:
        RunnerError: the recipe is wrong, or the training failed.
    """
    registry = Registry([Path(path) for path in plugins])
    return run(load(recipe, _assignments(set), registry), registry, workspace(), _Silent())


def load_model(
    run: PathLike | RunResult = "latest",
    checkpoint: Literal["best", "last"] = "best",
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    plugins: Sequence[PathLike] = (),
) -> Learner:
    """The learner of a run with the parameters of a checkpoint, in evaluation mode and without stages.

    Args:
        run: what ``train`` returned, a run's folder, name, digits or MLflow id, or ``latest``.
        checkpoint: the one with the best objective (the last one where there is no objective), or the last one; the
            newest whole one if that is damaged.
        set: values that override the run's, by dotted path: ``{"device": "cpu"}``.
        plugins: Python files with the plugins of the run.

    Raises:
        RunnerError: there is no such run, or none of its checkpoints can be used.
    """
    if isinstance(run, RunResult):
        folder = RunFolder(Path(run.run_dir))
    else:
        folder = RunFolder(Path(run)) if Path(run, LOCK_NAME).exists() else find(workspace().runs, str(run))
    recipe = load(folder.path / LOCK_NAME, _assignments(set), Registry([Path(path) for path in plugins]))
    learner = assemble(dataclasses.replace(recipe, stages={})).learner
    found = reader.checkpoints(folder.checkpoints)
    best = reader.best(found) if checkpoint == "best" else None
    for path in ([best] if best else []) + found[::-1]:
        try:
            learner.load_state_dict(reader.load(path)["pipeline"]["learner"])
            break
        except reader.DamagedError:
            continue
    else:
        raise CheckpointError(f"run {folder.name} has no checkpoint that can be used")
    for module in learner.modules().values():
        module.eval()
    evaluation = learner.evaluating()
    evaluation.__enter__()
    vars(learner)["_evaluation"] = evaluation  # which ends, should nobody hold it
    return learner


def _assignments(values: Mapping[str, Any] | None) -> list[str]:
    return [f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in (values or {}).items()]
