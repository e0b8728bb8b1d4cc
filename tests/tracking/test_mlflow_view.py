import json
from html.parser import HTMLParser

import pytest
from browser import needs_browser, page
from running import RECIPES
from servers import server

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.tracking import Workspace
from runner.tracking.mlflow_view import NAME, SHARED, TAG, view_of
from runner.tracking.store import VIEW, Store

COLUMNS = [
    "attributes.`Run Name`",
    "metrics.`eval/accuracy`",
    "tags.`overrides`",
    "metrics.`perf/update_ms`",
    "duration",
    "tags.`kind`",
    "metrics.`eval/loss`",
]
GROUPS = ("attributes.", "metrics.", "tags.", "duration")
"""Beginnings of the columns' ids, of which boxes to tick have none."""


def recipe(name):
    return load(RECIPES / f"{name}.yaml", (), Registry())


class Table(HTMLParser):
    """The table of runs on a page: its columns from left to right, and the ids of its runs from top to bottom."""

    def __init__(self, text):
        super().__init__()
        self._columns, self._rows = {}, {}
        self.feed(text)
        self.columns = [name for name, _ in sorted(self._columns.items(), key=lambda each: each[1])]
        self.runs = [run_id for run_id, _ in sorted(self._rows.items(), key=lambda each: each[1])]

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get("role") == "columnheader" and found.get("col-id", "").startswith(GROUPS):
            self._columns[found["col-id"]] = int(found["aria-colindex"])
        if "row-id" in found:
            self._rows[found["row-id"]] = int(found["row-index"])


def test_the_objective_orders_the_runs_and_what_was_overridden_stands_beside_it():
    view = json.loads(view_of(recipe("digits_classifier"), also=("perf/samples_per_second",)))
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`eval/accuracy`", False)
    assert view["selectedColumns"] == [
        "metrics.`eval/accuracy`", "metrics.`perf/samples_per_second`", "tags.`overrides`", "metrics.`perf/update_ms`",
        "tags.`kind`", "metrics.`eval/loss`",
    ]  # fmt: skip
    assert json.loads(view_of(recipe("shakespeare_gpt")))["orderByAsc"]  # less is better


def test_newer_pages_find_the_same_in_an_envelope_with_a_name():
    view = json.loads(view_of(recipe("marl_phase2")))
    assert view["name"] == NAME
    assert json.loads(view["state"]).items() <= view.items()


@pytest.mark.usefixtures("migrated_workspace")
def test_an_experiment_keeps_the_view_of_the_newest_recipe():
    store = Store(Workspace())
    for name in ("digits_classifier", "shakespeare_gpt"):
        experiment_id = store.experiment("tests", view_of(recipe(name)))
    store.experiment("tests")
    assert store.client.get_experiment(experiment_id).tags[TAG] == view_of(recipe("shakespeare_gpt"))


@needs_browser
def test_mlflows_page_shows_the_view(migrated_workspace, tmp_path):
    store = Store(Workspace())
    given = recipe("digits_classifier")
    experiment_id = store.experiment("tests", view_of(given))
    runs = {}
    accuracies = {"bad": 0.5, "best": 0.9, "ablation": None, "good": 0.8, "trial": 0.95, "variant": 0.97}
    for name, accuracy in accuracies.items():
        runs[name] = store.create_run(experiment_id, name)
        judged = {"eval/accuracy": accuracy, "eval/loss": 0.3, "eval/other": 1.0, "perf/update_ms": 3.0}
        metrics = judged if accuracy else {"ratio": 1.0}
        points = [(metric, value, 1, step) for metric, value in metrics.items() for step in (1, 2)]
        kind = name if name in ("trial", "variant") else "run"
        store.send(runs[name], points, {"seed": "1"}, {"kind": kind, "overrides": "seed=1", "device": "cpu"})
    with server(migrated_workspace / "mlflow.db", migrated_workspace / "artifacts") as mlflow:
        address = f"{mlflow.address}/#/experiments/{experiment_id}/runs?{SHARED}&{VIEW}"
        text = page(address, tmp_path, width=2400)
    assert NAME in text
    table = Table(text)
    assert table.runs == [runs[name] for name in ("best", "good", "bad", "ablation")]  # trials and variants are hidden
    assert table.columns == COLUMNS
