"""Trains a recipe in a child process and reads back how its evaluations went."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from mlflow import MlflowClient


def train(recipe: str, sets: Sequence[str]) -> dict[str, Any]:
    """One run on one thread, in a workspace of its own.

    Returns:
        ``curve`` (evaluation metrics by environment step), ``seconds``, active ``stages`` and the ``sets``.

    Raises:
        SystemExit: the run failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as workspace:
        arguments = [part for value in sets for part in ("--set", value)]
        child = subprocess.run(
            [sys.executable, "-m", "runner", "run", recipe, "--quiet", "--json", *arguments],
            env={**os.environ, "RUNNER_WORKSPACE": workspace, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise SystemExit(f"{recipe} {' '.join(sets)}:\n{child.stderr}")
        result = json.loads(child.stdout)
        client = MlflowClient(result["tracking_uri"])
        curve: dict[int, dict[str, float]] = {}
        for name in (name for name in result["metrics"] if name.startswith("eval/")):
            for point in client.get_metric_history(result["run_id"], name):
                curve.setdefault(point.step, {})[name.removeprefix("eval/")] = point.value
    active = [kind for kind, report in result["stages"].items() if report["active"]]
    return {"curve": curve, "seconds": round(result["seconds"]), "stages": active, "sets": list(sets)}
