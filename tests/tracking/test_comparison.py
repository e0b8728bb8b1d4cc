import io
import json
import math
from urllib.parse import parse_qs

import pytest
from browser import needs_browser, page
from servers import server

from runner.system.console import Console
from runner.system.errors import UsageError
from runner.system.secrets import MASK
from runner.tracking.comparison import compare
from runner.tracking.comparison_view import show
from runner.tracking.spool import Spool
from runner.tracking.store import Store
from runner.tracking.workspace import RunFolder, Workspace


@pytest.fixture
def store(migrated_workspace):
    return Store(Workspace())


@pytest.fixture
def record(store, tmp_path):
    """Records a finished run and returns its id."""

    def record(name, params=None, tags=None, metrics=None, lock="", status="FINISHED"):
        run_id = store.create_run(store.experiment("marl"), name)
        store.client.update_run(run_id, name=f"{name}-{run_id[:8]}")
        points = [(key, value, 1, step) for key, values in (metrics or {}).items() for step, value in enumerate(values)]
        store.send(run_id, points, params or {}, tags or {})
        if lock:
            (tmp_path / "recipe.lock.yaml").write_text(lock)
            store.client.log_artifact(run_id, str(tmp_path / "recipe.lock.yaml"))
        store.set_status(run_id, status, 1)
        return run_id

    return record


def test_only_what_differs_is_told(record):
    first = record(
        "marl_baseline",
        params={"seed": "1", "optimization.amp": "off"},
        tags={"stages": "none", "device": "cpu", "run_dir": "/a", "mlflow.user": "me", "recipe.digest": "aaa"},
        lock="recipe: {seed: 1}\nsource: {commit: aaa}\npackages: {torch: 2.13.0, rich: 14.0.0}\nthreads: {torch: 1}\n",
        metrics={"eval/return": [1.0, 2.0], "eval/same": [1.0]},
    )
    second = record(
        "marl_phase2",
        params={"seed": "1", "optimization.amp": "on", "optimization.amp.dtype": "bf16"},
        tags={"stages": "amp", "device": "cpu", "run_dir": "/b", "mlflow.user": "you", "recipe.digest": "bbb"},
        lock="recipe: {seed: 1}\nsource: {commit: bbb}\npackages: {torch: 2.13.1, rich: 14.0.0}\nthreads: {torch: 1}\n",
        metrics={"eval/return": [1.0, 3.0], "eval/same": [1.0]},
        status="STOPPED",
    )
    found = compare(Workspace(), [first[:8], second])
    assert [run["run_id"] for run in found["runs"]] == [first, second]
    assert found["settings"] == {"optimization.amp": ["off", "on"], "optimization.amp.dtype": [None, "bf16"]}
    assert found["environment"] == {
        "packages.torch": ["2.13.0", "2.13.1"],
        "source.commit": ["aaa", "bbb"],
        "stages": ["none", "amp"],
        "status": ["FINISHED", "STOPPED"],
    }
    assert found["metrics"] == {"eval/return": [2.0, 3.0]}
    page, _, query = found["link"].partition("?")
    assert page == f"http://127.0.0.1:5000/#/experiments/{found['runs'][0]['experiment_id']}/runs"
    assert parse_qs(query)["searchFilter"] == [f"attributes.run_id IN ('{first}','{second}')"]
    assert parse_qs(query)["compareRunsMode"] == ["CHART"]
    assert parse_qs(query)["orderByKey"] == ["tags.`mlflow.runName`"]
    assert parse_qs(query)["workflowType"] == ["machine_learning"]
    assert " " not in found["link"]
    assert '"' not in found["link"]


def test_runs_of_several_experiments_are_compared_by_what_they_came_to(record, store):
    first, second = record("alpha"), store.create_run(store.experiment("other"), "beta")
    page, _, query = compare(Workspace(), [first, second])["link"].partition("?")
    assert page == "http://127.0.0.1:5000/#/compare-runs"
    assert json.loads(parse_qs(query)["runs"][0]) == [first, second]
    assert len(json.loads(parse_qs(query)["experiments"][0])) == 2


@needs_browser
def test_mlflows_page_shows_the_curves_of_the_runs_on_one_axis(record, migrated_workspace, tmp_path):
    """Of runs that belong to no group, and of some of a group, without the group."""
    values = {"one": [3.0, 2.0, 1.5], "two": [3.0, 1.0, 0.5], "three": [3.0, 2.5, 2.0], "other": [0.0, 0.0, 0.0]}
    group = {"mlflow.parentRunId": record("group", metrics={"eval/loss": [1.33]})}
    sets_of_runs = [
        [record(name, tags=tags, metrics={"eval/loss": curve}) for name, curve in values.items()]
        for tags in ({}, group)
    ]
    with server(migrated_workspace / "mlflow.db", migrated_workspace / "artifacts") as mlflow:
        for runs in sets_of_runs:
            link = compare(Workspace(), runs[:3])["link"]
            text = page(link.replace("http://127.0.0.1:5000", mlflow.address), tmp_path)
            check_curves(text, dict(zip(values, runs, strict=True)))


def check_curves(text, runs):
    """Asserts that MLflow's page shows the curves of all runs but the last one, by name."""
    assert "eval/loss" in text
    assert text.count('data-unformatted="Step"') == 1
    assert text.count('class="js-line"') >= 3
    for name, run_id in runs.items():
        assert (f">{name}-{run_id[:8]}<" in text) == (name != "other")
    assert ">group-" not in text
    assert "undefined" not in text.partition("Sort:")[2][:60]


def test_secrets_that_others_logged_are_not_told(record):
    first = record("a", params={"data.tokens": "12"}, tags={"note": "http://me:hunter2@host"})
    second = record("b", params={"data.tokens": "13", "url": "http://me:hunter2@host"})
    found = compare(Workspace(), [first, second])
    assert found["settings"] == {"data.tokens": ["12", "13"], "url": [None, f"http://me:{MASK}@host"]}
    assert found["environment"] == {"note": [f"http://me:{MASK}@host", None]}


def test_equal_numbers_that_are_no_numbers_do_not_differ_and_are_text(record):
    names = ("one", "other")  # an id never begins like these
    for name in names:
        record(name, metrics={"loss": [math.nan]})
    assert compare(Workspace(), names)["metrics"] == {}
    record("third", metrics={"loss": [0.5]})
    assert compare(Workspace(), ["one", "third"])["metrics"] == {"loss": ["NaN", 0.5]}


def test_a_run_is_found_by_id_name_start_or_as_the_latest(record):
    first, second = record("alpha"), record("beta")
    for name in [first, first[:10], f"alpha-{first[:8]}", first[:8], "alpha", "al"]:
        assert [run["run_id"] for run in compare(Workspace(), [name, "latest"])["runs"]] == [first, second]


def test_a_name_that_fits_several_runs_lists_them(record):
    first, second = record("alpha"), record("alpha")
    with pytest.raises(UsageError, match="'alpha' matches 2 runs") as caught:
        compare(Workspace(), ["alpha", "latest"])
    assert f"alpha-{first[:8]}" in str(caught.value)
    assert f"alpha-{second[:8]}" in str(caught.value)


def test_a_name_that_fits_none_lists_what_there_is(record):
    for _ in range(10):
        record("alpha")
    with pytest.raises(UsageError, match=r"no run 'gamma' in the workspace; there are: (alpha-\w+, ){8}\.\.\.$"):
        compare(Workspace(), ["gamma", "latest"])


@pytest.mark.usefixtures("migrated_workspace")
def test_an_empty_workspace_says_so():
    with pytest.raises(UsageError, match="no runs yet"):
        compare(Workspace(), ["latest", "alpha"])


def test_one_run_or_the_same_twice_cannot_be_compared(record):
    record("alpha")
    with pytest.raises(UsageError, match="at least two runs"):
        compare(Workspace(), ["alpha"])
    with pytest.raises(UsageError, match="named twice"):
        compare(Workspace(), ["alpha", "latest"])


def comparison(runs):
    about = [
        {"run_id": str(n), "name": f"marl_phase{n}-0123456{n}", "status": "FINISHED", "experiment_id": "1"}
        for n in range(runs)
    ]
    rows = {
        "headline": {"eval/return": [2.0, *[3.0] * (runs - 1)], "eval/score": [-1.0, *[0.5] * (runs - 1)]},
        "settings": {"optimization.amp.dtype": ["bf16", *["fp16"] * (runs - 1)]},
        "environment": {"process.pid": ["7", *["8"] * (runs - 1)], "code.x": ["0a" * 32, *["0b" * 32] * (runs - 1)]},
        "metrics": {
            "eval/return": [2.0, *[3.0] * (runs - 1)],
            "perf/update_ms": [7.5, *[9.0] * (runs - 1)],
            "eval/loss": ["inf", None, *[0.5] * (runs - 2)],
        },
    }
    return {"runs": about, "link": "http://127.0.0.1:5000/#/compare-runs?" + "x" * 200, **rows}


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("runs", [2, 3, 9])
def test_tables_fit_the_screen_and_show_every_run(width, runs):
    screen = io.StringIO()
    show(comparison(runs), False, Console(file=screen, width=width))
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("http"))
    assert lines[-1].endswith("x" * 200)  # the link stays in one piece
    for n in range(runs):
        assert f"0123456{n}" in screen.getvalue()
    assert "3 (1.5x)" in screen.getvalue()
    assert "environment: no difference" not in screen.getvalue()


def told(found, everything=False):
    screen = io.StringIO()
    show(found, everything, Console(file=screen, width=100))
    return screen.getvalue()


def test_the_headline_comes_first_and_once_and_noise_not_at_all():
    text = told(comparison(2))
    places = [
        text.index(each)
        for each in ("primary metrics", "eval/return", "settings", "environment", "\nmetrics:", "eval/loss")
    ]
    assert places == sorted(places)
    assert text.count("eval/return") == 1
    assert "process.pid" not in text
    assert f"{'0a' * 6} " in text
    assert "0a" * 7 not in text  # no more of a digest than tells it from another
    assert "perf/" not in text
    assert "2 more differences (speed, process): --all" in text
    assert "process.pid" in told(comparison(2), everything=True)
    assert "perf/update_ms" in told(comparison(2), everything=True)


@pytest.mark.parametrize(("second", "mark"), [(3.0, True), (2.00001, False), (2.0, False)])
def test_a_star_marks_the_best_run_unless_its_value_is_printed_like_another(second, mark):
    found = comparison(2) | {"objective": ["maximize", "eval/return"]}
    found["headline"]["eval/return"] = [2.0, second]
    assert ("* best eval/return: maximize" in told(found)) is mark


def test_where_signs_differ_a_difference_is_told_and_no_ratio():
    text = told(comparison(2))
    assert "3 (1.5x)" in text
    assert "0.5 (+1.5)" in text
    assert "-0.5x" not in text


def test_headline_metrics_are_told_where_they_are_equal_too(record):
    tags = {"recipe.headline": "eval/return,eval/rate"}
    first = record("a", tags=tags, metrics={"eval/return": [1.0], "eval/rate": [0.5], "eval/other": [1.0]})
    second = record("b", tags=tags, metrics={"eval/return": [2.0], "eval/rate": [0.5], "eval/other": [1.0]})
    found = compare(Workspace(), [first, second])
    assert found["headline"] == {"eval/return": [1.0, 2.0], "eval/rate": [0.5, 0.5]}
    assert list(found["headline"]) == ["eval/return", "eval/rate"]
    assert found["environment"] == {}


@pytest.mark.parametrize("width", [80, 160])
def test_a_run_whose_log_is_not_completely_sent_is_named(width, record):
    names = [record(name, metrics={"eval/loss": [2.0, 1.0]}) for name in ("sent", "waiting")]
    folder = Workspace().runs / f"waiting-{names[1][:8]}"
    folder.mkdir(parents=True)
    compared = compare(Workspace(), names)
    assert [run["unsent_bytes"] for run in compared["runs"]] == [0, 0]
    spool = Spool(RunFolder(folder).spool)
    spool.append(t=3, step=2, metrics={"eval/loss": 0.5})
    spool.close()
    compared = compare(Workspace(), names)
    assert [run["unsent_bytes"] > 0 for run in compared["runs"]] == [False, True]
    stream = io.StringIO()
    show(compared, False, Console(file=stream, width=width))
    text = " ".join(stream.getvalue().replace("\\\n", " ").split())
    assert f"B: its last values are not in MLflow yet, and not here: runner sync {folder.name}" in text
