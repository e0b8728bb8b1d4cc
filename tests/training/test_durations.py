"""A run has one duration: in its result, in the workspace and in MLflow; start-up and activities are shares of it."""

import time

import mlflow
import pytest
from running import TINY_DIGITS, tiny

from runner.plugin.registry import Registry
from runner.tracking import Workspace
from runner.tracking.workspace import RunFolder
from runner.training.outputs import NoOutput
from runner.training.run import run


@pytest.mark.usefixtures("migrated_workspace")
def test_result_workspace_and_mlflow_have_the_same_duration_which_shares_add_up_to():
    waited = 1.5
    started = time.perf_counter() - waited
    recipe = tiny("digits_classifier", *TINY_DIGITS)
    result = run(recipe, Registry(), Workspace(), NoOutput(), started=started)
    measured = time.perf_counter() - started

    record = RunFolder(Workspace().runs / result.run_name).record()
    assert record is not None
    assert record.seconds == pytest.approx(result.seconds)
    info = mlflow.MlflowClient(result.tracking_uri).get_run(result.run_id).info
    assert (info.end_time - info.start_time) / 1e3 == pytest.approx(result.seconds, abs=0.3)

    assert waited < result.startup_seconds < result.seconds < measured
    assert sum(result.shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert all(share >= 0 for share in result.shares.values())
    assert result.shares["startup"] == pytest.approx(result.startup_seconds / result.seconds)
    assert {"update", "evaluate", "checkpoint"} <= result.shares.keys()
