"""Evaluates the trained model of a run again, or loads it for a program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.plugin.configs import SourceConfig
from runner.plugin.learner import Learner
from runner.plugin.plugin_errors import told
from runner.plugin.registry import Registry
from runner.recipe.loader import assignments
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import UsageError
from runner.tracking.workspace import RunFolder
from runner.training.checkpoint_files import read_manifest
from runner.training.checkpoint_selection import Which, load_chosen
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble, resolve_device
from runner.training.result import RunResult
from runner.training.trained_run import trained
from runner.training.tuning import answering_tuning


@dataclass(frozen=True)
class Evaluation:
    """The output of ``runner evaluate --json``, without its schema version."""

    run_name: str
    checkpoint: str
    """Its folder."""
    step: int
    """How far the training was, in the recipe's unit."""
    metrics: dict[str, float]
    recorded: dict[str, float] | None
    """The metrics that the run measured at this checkpoint; None if it measured none."""
    picture: str | None
    """The file that the evaluation was drawn into."""
    seconds: float
    synthetic: bool = False
    """Whether the data are synthetic."""

    @property
    def same_digits(self) -> bool | None:
        """Returns whether the digits equal those of the run's evaluation; None without one."""
        return (
            None
            if self.recorded is None
            else _digits(self.metrics) == _digits(self.recorded)
        )

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return dataclasses.asdict(self) | {"same_digits": self.same_digits}


def evaluate(
    recipe: Recipe,
    registry: Registry,
    folder: RunFolder,
    which: Which = "best",
    picture: Path | None = None,
) -> Evaluation:
    """Evaluates a checkpoint of a run once, with the stages of its recipe, as the run itself did.

    Args:
        recipe: of the run's lock, or with other settings for what is evaluated.
        registry: where its plugins come from.
        folder: of the run.
        which: as for ``load_chosen``.
        picture: a file that the source draws the same evaluation into.

    Returns:
        Metrics; on a CPU and with the lock's settings, they have the digits of the run's
            evaluation.

    Raises:
        UsageError: the source draws no such file.
        CheckpointError: no checkpoint can be used, or it does not fit the recipe.
    """
    started = time.perf_counter()
    if picture is not None:
        _refuse(recipe.data, picture)
    path, state = load_chosen(folder, which, is_training=True)
    with generators.exclusive(f"the evaluation of {folder.name}"):
        generators.seed(recipe.seed)
        tuning = answering_tuning(recipe, resolve_device(recipe.device))
        pipeline = assemble(
            recipe, registry.files, resumed=state["pipeline"], tuning=tuning
        )
        pipeline.load_learnt(state["pipeline"])
        metrics = evaluated(pipeline)
        if picture is not None:
            try:
                pipeline.source.render(pipeline.learner, picture)
            except OSError as error:
                raise UsageError(
                    f"{picture} cannot be written: {error.strerror or error}"
                ) from error
    logged = {
        name[5:]: value
        for name, value in state["metrics"].items()
        if name.startswith("eval/")
    }
    measured = state["complete"] or read_manifest(path)["score"] is not None
    return Evaluation(
        folder.name, str(path), state["step"], metrics, logged if measured else None,
        None if picture is None else str(picture), time.perf_counter() - started, recipe.data.is_synthetic(),
    )  # fmt: skip


def load_model(
    run: Path | str | RunResult = "latest",
    checkpoint: Which = "best",
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    plugins: Sequence[Path | str | type[Any]] = (),
) -> Learner:
    """The learner of a run with the parameters of a checkpoint, in evaluation mode and without stages.

    Args:
        run: the result of ``train``; a run's folder, name, digits or MLflow id; ``latest``; or a
            model in MLflow, as ``models:/m-...``.
        checkpoint: the one with the best objective (the last one without an objective), or the last
            one; the newest undamaged one if that is damaged.
        set: values that override the run's, by dotted path: ``{"device": "cpu"}``.
        plugins: Python files with the plugins of the run, or classes of their settings; for a run
            of this workspace, unchanged files are found automatically.

    Raises:
        RunnerError: there is no such run, its plugins are required as an argument, or none of its
            checkpoints is usable.
    """
    found = run.run_dir if isinstance(run, RunResult) else run
    with told():
        return (
            trained(found, checkpoint, assignments(set or {}), plugins)
            .pipeline()
            .learner
        )


def _refuse(data: SourceConfig, picture: Path) -> None:
    if not data.pictures:
        raise UsageError(f"'{data.kind}' has no picture of its evaluation to draw")
    if picture.suffix not in data.pictures:
        raise UsageError(
            f"'{data.kind}' draws {' or '.join(data.pictures)}, not '{picture.name}'"
        )
    if not picture.absolute().parent.is_dir():
        raise UsageError(f"no such folder: {picture.parent}")


def _digits(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: repr(value) for name, value in metrics.items()}
