"""A model that is read again is that of its training, or a warning names what has changed."""

import logging
import shutil

import pytest
from toy_runs import TOYS

import runner
from runner.plugin.registry import Registry
from runner.serve.load import load
from runner.tracking.store import Store
from runner.tracking.workspace import Workspace
from runner.training.trained_run import trained

SERVED = TOYS.with_name("serve") / "obedient.py"
RECIPE = {
    "name": "toy",
    "device": "cpu",
    "model": {"kind": "toy_obedient"},
    "data": {"kind": "toy_words"},
    "train": {"updates": 1, "batch_size": 8},
    "tracking": {"system_metrics": False},
}


@pytest.fixture
def plugins(tmp_path, migrated_workspace):
    """The plugin files of a finished run; another file is a copy of one of them with a change."""
    runner.train(RECIPE, plugins=[TOYS, SERVED])
    changed = tmp_path / "changed" / SERVED.name
    changed.parent.mkdir()
    shutil.copy(SERVED, changed)
    changed.write_text(f"{changed.read_text()}\nCONSTANT = 3\n")
    return {"same": [TOYS, SERVED], "changed": [TOYS, changed]}


def model_in_mlflow():
    (logged,) = Store(Workspace()).client.search_logged_models(["1"])
    return f"models:/{logged.model_id}"


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("reference", ["latest", "models:/"])
def test_changed_code_is_named(plugins, reference, caplog):
    run = reference if reference == "latest" else model_in_mlflow()
    runner.load_model(run, plugins=plugins["same"])
    assert warnings_of(caplog) == []
    runner.load_model(run, plugins=plugins["changed"])
    (warning,) = warnings_of(caplog)
    assert "has changed since its training: " in warning
    assert f"code.{SERVED.name}: " in warning


def test_a_server_lists_the_changes(plugins):
    served, _ = load("latest", None, ["serve.port=0"], Registry(plugins["changed"]))
    assert any(change.startswith(f"code.{SERVED.name}: ") for change in served.about["changes"])
    served, _ = load("latest", None, ["serve.port=0"], Registry(plugins["same"]))
    assert served.about["changes"] == []


def test_settings_and_stages_of_the_caller_are_no_change(plugins):
    sets = ["train.batch_size=4", "optimization.amp=on"]
    assert trained("latest", sets=sets, plugins=plugins["same"]).changes == ()
