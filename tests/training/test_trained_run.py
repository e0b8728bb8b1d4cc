"""A model that is read again is that of its training, or a warning names what has changed."""

import logging
import random
import shutil

import numpy as np
import pytest
import torch
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


DRAWING = """
import random

import numpy as np
import torch
from torch import nn

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss


class NetConfig(GradientLearnerConfig):
    '''Has random features that are no buffer.'''

    kind, learns_from, implementation = "drawing", "drawn_rows", "Net"


class Net(GradientLearner):
    def __init__(self, config, shapes, context):
        super().__init__(config, shapes, context)
        self.projection = torch.randn(3, 4)
        self.offset, self.scale = random.random(), np.random.rand()

    def build(self, config, shapes, context):
        return nn.Linear(4, 1)

    def loss(self, batch, noise, progress):
        error = self.slots.forward(self.features(batch["x"])) - batch["y"]
        return Loss(error.square().sum(), len(error))

    def features(self, x):
        return (x @ self.projection + self.offset).cos() * self.scale

    def predict(self, x):
        return super().predict(self.features(x))


class RowsConfig(DatasetConfig):
    '''Random rows.'''

    kind, provides, implementation = "drawn_rows", "drawn_rows", "Rows"


class Rows(DatasetSource):
    def datasets(self, config):
        x = torch.randn(40, 3)
        data = {"x": x, "y": x.sum(1, keepdim=True) + random.random()}
        return {key: rows[:24] for key, rows in data.items()}, {key: rows[24:] for key, rows in data.items()}
"""
ROWS = torch.linspace(-1, 1, 48).reshape(16, 3)


def global_numbers():
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def test_a_loaded_model_has_the_random_numbers_of_its_training(tmp_path, migrated_workspace):
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    kinds = {"model": {"kind": "drawing"}, "data": {"kind": "drawn_rows"}}
    result = runner.train(RECIPE | kinds, plugins=[file])
    for number in range(2):
        torch.manual_seed(number)
        learner = runner.load_model(result, "last", plugins=[file])
        pipeline = trained(result.run_dir, "last", plugins=[file]).pipeline()
        evaluated = pipeline.source.evaluate(learner)
        assert evaluated["loss"] == pytest.approx(result.metrics["eval/loss"], rel=1e-6)
        assert torch.equal(learner.predict(ROWS), pipeline.learner.predict(ROWS))


def test_loading_leaves_the_generators_as_they_are(plugins):
    for load_once in (lambda: None, lambda: runner.load_model("latest", plugins=plugins["same"])):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        load_once()
        numbers = global_numbers()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert numbers == global_numbers()
