"""Evaluates the trained model of a run again, or loads it for a program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.plugin.configs import SourceConfig
from runner.plugin.learner import Learner
from runner.plugin.plugin_errors import told
from runner.plugin.registry import Registry
from runner.plugin.source import State
from runner.recipe.loader import assignments
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import UsageError
from runner.tracking.keys import mlflow_key
from runner.tracking.seeds import TEST
from runner.tracking.workspace import RunFolder
from runner.training.checkpoint import best, checkpoints
from runner.training.checkpoint_files import read_manifest
from runner.training.checkpoint_selection import Which, load_chosen
from runner.training.evaluation import Part, evaluated
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.result import RunResult
from runner.training.trained_run import trained
from runner.training.tuning import answering_tuning


@dataclass(frozen=True)
class Evaluation:
    """The output of ``runner evaluate --json``, without its schema version.

    Attributes:
        run_name: Name of the run.
        checkpoint: Folder of the checkpoint.
        step: Progress of the training, in the recipe's unit.
        metrics: Metrics of this evaluation.
        recorded: The metrics that the run measured at this checkpoint; None if it measured none.
        picture: The file that the evaluation was drawn into.
        seconds: Wall-clock time.
        synthetic: Whether the data are synthetic.
        part: The evaluated part of the data: ``test``, or ``validation``, which selected the best
            checkpoint.
    """

    run_name: str
    checkpoint: str
    step: int
    metrics: dict[str, float]
    recorded: dict[str, float] | None
    picture: str | None
    seconds: float
    synthetic: bool = False
    part: Part = "validation"

    @property
    def same_digits(self) -> bool | None:
        """Returns whether the digits equal those of the run's evaluation; None without one."""
        if self.recorded is None:
            return None
        return _digits(self.metrics) == _digits(self.recorded)

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return dataclasses.asdict(self) | {"same_digits": self.same_digits}


def evaluate(
    recipe: Recipe,
    registry: Registry,
    folder: RunFolder,
    which: Which = "best",
    picture: Path | None = None,
    part: Part | None = None,
) -> Evaluation:
    """Evaluates a checkpoint of a run once, with the stages of its recipe, as the run itself did.

    Args:
        recipe: The recipe of the run's lock, or one with other settings for the evaluation.
        registry: The plugins of the recipe.
        folder: The folder of the run.
        which: As for ``load_chosen``.
        picture: A file that the source draws the same evaluation into.
        part: The part of the data; by default the test part, where the data have one.

    Returns:
        Metrics; on a CPU and with the lock's settings, they have the digits of the run's
            evaluation.

    Raises:
        UsageError: The source draws no such file, or has no test part.
        CheckpointError: No checkpoint can be used, or it does not fit the recipe.
    """
    started = time.perf_counter()
    if picture is not None:
        _refuse(recipe.data, picture)
    path, state = load_chosen(folder, which, is_training=True)
    with generators.exclusive(f"the evaluation of {folder.name}"):
        # Some sources draw held-out data from the global generators when they are built.
        generators.seed(recipe.seed)
        # Nothing is searched for an evaluation of seconds.
        tuning = answering_tuning(recipe, resolve_device(recipe.device))
        pipeline = assemble(
            recipe, registry.files, resumed=state["pipeline"], tuning=tuning
        )
        pipeline.load_learnt(state["pipeline"])
        part = _part_of(pipeline, part)
        metrics = evaluated(pipeline, part)
        if picture is not None:
            _render(pipeline, picture, part)
    if part == "test":
        recorded = _recorded_test(folder, path, metrics)
    else:
        recorded = _recorded(path, state)
    return Evaluation(
        run_name=folder.name,
        checkpoint=str(path),
        step=state["step"],
        metrics=metrics,
        recorded=recorded,
        picture=None if picture is None else str(picture),
        seconds=time.perf_counter() - started,
        synthetic=recipe.data.is_synthetic(),
        part=part,
    )


def _part_of(pipeline: Assembly, part: Part | None) -> Part:
    """Returns the part of the data to evaluate.

    Raises:
        UsageError: There is no test part.
    """
    has_test = pipeline.source.has_test()
    if part == "test" and not has_test:
        kind = pipeline.recipe.data.kind
        raise UsageError(
            f"--part test: '{kind}' has no test part; use --part validation, or train with "
            "data.test, which sets one aside"
        )
    return part or ("test" if has_test else "validation")


def _render(pipeline: Assembly, picture: Path, part: Part) -> None:
    """Draws the evaluation of a part of the data."""
    source = pipeline.source
    try:
        with source.testing() if part == "test" else nullcontext():
            source.render(pipeline.learner, picture)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{picture} cannot be written: {reason}") from error


def _recorded(folder: Path, state: State) -> dict[str, float] | None:
    """Returns the metrics that a run evaluated at a checkpoint; None if it evaluated none."""
    # A checkpoint without a score was written between two evaluations.
    if not state["complete"] and read_manifest(folder)["score"] is None:
        return None
    return {
        name.removeprefix("eval/"): value
        for name, value in state["metrics"].items()
        if name.startswith("eval/")
    }


def _recorded_test(
    folder: RunFolder, checkpoint: Path, names: Iterable[str]
) -> dict[str, float] | None:
    """Returns metrics of a run's test; None if it has tested no or another checkpoint."""
    record = folder.record()
    paths = checkpoints(folder.checkpoints)
    if record is None or checkpoint != (best(paths) or paths[-1]):
        return None
    keys = {name: mlflow_key(f"{TEST}{name}") for name in names}
    metrics = {
        name: float(record.metrics[key])
        for name, key in keys.items()
        if key in record.metrics
    }
    return metrics or None


def load_model(
    run: Path | str | RunResult = "latest",
    checkpoint: Which = "best",
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    plugins: Sequence[Path | str | type[Any]] = (),
) -> Learner:
    """Returns the learner of a run with the parameters of a checkpoint.

    The learner is in evaluation mode and without stages. The best checkpoint was selected on the
    validation part of the data; ``result.metrics["test/..."]`` and ``runner evaluate`` measure it
    on the test part.

    Args:
        run: The result of ``train``; a run's folder, name, digits or MLflow id; ``latest``; or a
            model in MLflow, as ``models:/m-...``.
        checkpoint: The one with the best objective (the last one without an objective), or the last
            one; the newest undamaged one if that is damaged.
        set: Values that override the run's, by dotted path: ``{"device": "cpu"}``.
        plugins: Python files with the plugins of the run, or classes of their settings; for a run
            of this workspace, unchanged files are found automatically.

    Raises:
        RunnerError: The run does not exist, its plugins are required as an argument, or none of its
            checkpoints is usable.
    """
    reference = run.run_dir if isinstance(run, RunResult) else run
    overrides = assignments(set or {})
    with told():
        model = trained(reference, checkpoint, overrides, plugins)
        return model.pipeline().learner


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
    # Two NaN are equal as texts.
    return {name: repr(value) for name, value in metrics.items()}
