"""Folder of an ablation: a new one, or an interrupted one of the same experiment."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from runner.ablation.experiment import Experiment
from runner.ablation.measurement_log import HEAD, ROUNDS, identity_of
from runner.recipe.lock import code_of
from runner.system.errors import UsageError
from runner.system.files import remove
from runner.system.hardware import hardware
from runner.tracking.workspace import Workspace, folder_name

REPORT = "README.md"
RESULT = "result.json"
RUNS = "mlflow.json"
"""Ids of the runs in MLflow, for publishing again."""


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """Describes what is measured, with which code, and on which machine.

    Measurements of two ablations belong together only if all of it is the same.
    """
    return {
        "name": experiment.config.name,
        "digest": experiment.digest,
        "code": {case.name: code_of(case.recipe) for case in experiment.cases},
        "machine": {
            name: value for name, value in hardware().items() if name != "platform"
        },
        "torch": torch.__version__,
        # The first format did not record which process a time is of.
        "log format": 2,
    }


def choose_folder(
    workspace: Workspace, description: dict[str, Any], out: Path | None, fresh: bool
) -> Path:
    """Returns the folder to measure in.

    Args:
        workspace: Place of the folders of all ablations.
        description: Result of ``describe_experiment``.
        out: The user's folder; None chooses one of the workspace.
        fresh: Starts again, although an interrupted ablation could be continued.

    Raises:
        UsageError: ``out`` holds another ablation, or this one, finished.
    """
    if out is None:
        parent = workspace.ablations
        heads = parent.glob(f"*/{HEAD}")
        matching = [
            head.parent for head in heads if identity_of(head.parent) == description
        ]
        unfinished = [folder for folder in matching if not (folder / RESULT).exists()]
        if unfinished and not fresh:
            return max(unfinished, key=lambda folder: (folder / HEAD).stat().st_mtime)
        return parent / f"{folder_name(description['name'])}-{uuid.uuid4().hex[:8]}"

    present = identity_of(out)
    if present is not None and fresh:
        # Files of other names stay, and the report is written over.
        for name in (ROUNDS, RESULT, RUNS, HEAD):
            remove(out / name)
    elif present == description and (out / RESULT).exists():
        message = f"{out} holds this ablation, finished; --fresh measures it again, in its place"
        raise UsageError(message)
    elif present is not None and present != description:
        names = (name for name in description if present.get(name) != description[name])
        differing = ", ".join(sorted(names))
        hint = "name another folder, or replace it: --fresh"
        raise UsageError(f"{out} holds another ablation ({differing} differ); {hint}")
    return out
