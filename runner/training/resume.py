"""Resumes a run from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.plugin.registry import Registry
from runner.recipe.loader import assignments
from runner.recipe.lock import Drift
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.locked_recipe import load_locked, refuse_reached
from runner.tracking.lookup import folder_of
from runner.tracking.workspace import Workspace
from runner.training.progress_lines import displayed
from runner.training.result import RunResult
from runner.training.run import run as run_recipe


def resume(
    run: Path | str | RunResult = "latest",
    set: Mapping[str, Any] | None = None,  # noqa: A002
    *,
    plugins: Sequence[Path | str | type[Any]] = (),
    allow_drift: bool = False,
    progress: bool | None = None,
) -> RunResult:
    """Resumes a run from its newest usable checkpoint, as ``runner resume`` does.

    Args:
        run: The result of ``train``; a run's folder, name, digits or MLflow id; or ``latest``.
        set: Values that override the run's, by dotted path: ``{"train.epochs": 20}``.
        plugins: Python files with the plugins of the run, or classes of their settings.
        allow_drift: Whether it is resumed although recipe, code, data or packages have changed.
        progress: As for ``train``.

    Returns:
        As for ``train``.

    Raises:
        RunnerError: The run does not exist, cannot be resumed, or has changed.
    """
    folder = folder_of(run.run_dir if isinstance(run, RunResult) else run)
    if refusal := folder.refusal():
        raise UsageError(refusal)
    named = Registry(plugins)

    def hint(files: Mapping[Path, str]) -> str:
        return f"name them: plugins={[str(path) for path in (*named.files, *files)]}"

    lock = folder.path / LOCK_NAME
    recipe, registry, changes = load_locked(
        lock, folder.name, assignments(set or {}), named, hint
    )
    drifted = _accepted_drift(folder.name, changes, allow_drift)
    refuse_reached(folder, recipe)
    with displayed(recipe, progress) as display:
        return run_recipe(
            recipe,
            registry,
            Workspace(),
            display,
            folder,
            drifted,
            allow_drift=allow_drift,
        )


def _accepted_drift(name: str, changes: Sequence[Drift], is_allowed: bool) -> list[str]:
    """Returns the changes since the lock of a run that may change its results.

    Raises:
        UsageError: There are such changes, and they are not allowed.
    """
    drifted = [str(change) for change in changes if change.matters]
    if drifted and not is_allowed:
        raise UsageError(
            f"run {name} would not continue as it started: {'; '.join(drifted)}; "
            "undo that, or accept it with allow_drift=True"
        )
    return drifted
