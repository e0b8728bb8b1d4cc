import json
import statistics
from types import SimpleNamespace

import optuna
import pytest
from faces import FakeCatalog
from optuna.trial import TrialState
from studies import AIMS, read, study_text

from runner.recipe.loader import load
from runner.study.attempts import ATTEMPTS
from runner.study.leases import Lease
from runner.study.report import NO_VALUES, recipe_text, write_report
from runner.study.summary import (
    CAUSE,
    DISTURBED,
    FEWEST,
    FEWEST_DECIDE,
    NEIGHBOURS,
    OVERHEAD,
    REASON,
    RECIPE,
    VALUES,
    VERDICT,
    summarise,
)
from runner.study.trial_run import FEASIBLE
from runner.system.plots import NO_PLOTS

SPACE = """\
space:
  optimization.cache: {choice: [off, on]}
  optimization.cache.size: {int: [1, 64]}
  model.lr: {float: [1e-4, 1e-2], log: true}
"""
TWO = "objectives: {eval/return: maximize, perf/update_ms: minimize}\n"
COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


@pytest.fixture
def begun(store, tmp_path):
    """A study to which trials are added as workers leave them."""

    def begin(aims=AIMS, more=""):
        definition = read(tmp_path, study_text(SPACE, aims, more))
        study = store.create(definition)
        distributions = {
            "optimization.cache": optuna.distributions.CategoricalDistribution(("off", "on")),
            "optimization.cache.size": optuna.distributions.IntDistribution(1, 64),
            "model.lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
        }

        def add(values=None, state=COMPLETE, cause="done", reason="", excess=(), lr=1e-3, size=None, kept=()):
            settings = {"optimization.cache": "on" if size else "off", "model.lr": lr}
            settings |= {"optimization.cache.size": size} if size else {}
            attributes = {VALUES: settings, CAUSE: cause, REASON: reason, **dict(kept)}
            study.add_trial(
                optuna.create_trial(
                    state=state, values=values, params=settings, user_attrs=attributes,
                    distributions={name: distributions[name] for name in settings},
                    constraints={FEASIBLE: float(state == PRUNED and cause != "pruned"), **dict(excess)},
                )
            )  # fmt: skip

        return SimpleNamespace(study=study, add=add, definition=definition)

    return begin


def best(study):
    return [row.number for row in summarise(study).best]


def test_the_best_trial_is_the_one_with_the_best_value(begun):
    made = begun()
    for value in (1.0, 3.0, 2.0):
        made.add([value])
    assert best(made.study) == [1]
    assert [row.best for row in summarise(made.study).rows] == [False, True, False]


def test_the_front_is_what_nothing_beats_in_all_objectives_in_the_order_of_the_first(begun):
    made = begun(TWO)
    for values in ((1.0, 1.0), (3.0, 9.0), (2.0, 9.5), (2.5, 4.0), (0.5, 2.0)):
        made.add(list(values))
    assert best(made.study) == [1, 3, 0]
    assert summarise(made.study).objectives == {"eval/return": "maximize", "perf/update_ms": "minimize"}


def test_a_trial_beyond_a_bound_is_infeasible_and_not_the_best_however_good(begun):
    made = begun(more="constraints: {perf/update_ms: {max: 5}}\n")
    made.add([1.0], excess={"perf/update_ms": -1.0})
    made.add([9.0], excess={"perf/update_ms": 2.5})
    made.add([2.0], excess={"perf/update_ms": 0.0})
    found = summarise(made.study)
    assert best(made.study) == [2]
    assert [row.cause for row in found.rows] == ["done", "infeasible", "done"]
    assert found.rows[1].reason == "perf/update_ms is 2.5 beyond its bound"
    assert found.causes == {"done": 2, "infeasible": 1}


def test_where_nothing_counts_nothing_is_best(begun):
    made = begun(more="constraints: {perf/update_ms: {max: 5}}\n")
    assert best(made.study) == []
    made.add([9.0], excess={"perf/update_ms": 2.5})
    made.add(state=FAIL, cause="crashed", reason="SIGSEGV")
    assert best(made.study) == []
    assert summarise(made.study).importance == {}
    json.dumps(summarise(made.study).data())


def test_every_trial_says_what_became_of_it(begun):
    made = begun()
    made.add([1.0])
    made.add(state=PRUNED, cause="out of memory", reason="5 GiB")
    made.add([0.5], state=PRUNED, cause="pruned")
    made.add(state=FAIL, cause="hung", reason="no sign of progress")
    made.add(state=PRUNED, cause="gate", reason="FAIL: wrong", kept={VERDICT: {"outcome": "FAIL", "summary": "wrong"}})
    made.add(state=TrialState.RUNNING, cause="")
    made.study.enqueue_trial({})
    found = summarise(made.study)
    assert [row.cause for row in found.rows] == [
        *("done", "out of memory", "pruned", "hung", "gate", "running", "waiting"),
    ]
    assert [row.state for row in found.rows[-2:]] == ["RUNNING", "WAITING"]
    assert [row.reason for row in found.rows[1:5]] == ["5 GiB", "", "no sign of progress", "FAIL: wrong"]
    assert found.rows[4].verdict == "FAIL"
    assert found.causes == dict.fromkeys(("done", "out of memory", "pruned", "hung", "gate"), 1)
    assert best(made.study) == [0]


def test_the_recipe_as_it_is_is_known_by_its_place_in_the_queue(begun):
    made = begun()
    made.study.enqueue_trial({"model.lr": 1e-3})
    made.study.enqueue_trial({})
    assert [row.is_recipe for row in summarise(made.study).rows] == [True, False]


def test_used_is_what_all_workers_have_used(begun):
    made = begun(more="budget: {trials: 6, seconds: 500}\n")
    made.add([1.0], kept={ATTEMPTS: [{"begin": 0.0, "end": 10.0, "seed": 7}, {"begin": 20.0, "end": 30.0, "seed": 8}]})
    made.add([2.0], kept={ATTEMPTS: [{"begin": 5.0, "end": 25.0, "seed": 7}]})  # beside the first
    made.add(state=TrialState.RUNNING, cause="", kept={ATTEMPTS: [{"begin": 40.0, "seed": 7}]})
    made.study.enqueue_trial({})
    lease = Lease(study="mine", trial=2, worker="w", place="here", pid=1, born=0.0, beats=3, seen=47.0)
    found = summarise(made.study, [lease])
    assert (found.used.trials, found.used.seconds, found.used.device_seconds) == (2, 37.0, 47.0)
    assert [row.seconds for row in found.rows] == [20.0, 20.0, 0.0, 0.0]
    assert found.seconds_left == 2 * 37.0 / 2
    assert found.budget["seconds"] == 500
    assert summarise(made.study).used.seconds == 30.0


def test_what_is_left_is_unknown_before_the_first_trial_is_done(begun):
    made = begun()
    made.study.enqueue_trial({})
    assert summarise(made.study).seconds_left is None


@pytest.mark.parametrize("aims", [AIMS, AIMS.replace("maximize", "minimize")])
def test_what_sets_the_best_apart_decides_and_not_what_sets_the_worst_apart(begun, aims):
    made, sign = begun(aims), 1 if "maximize" in aims else -1
    for number in range(20):
        lr = 1e-2 if number > 16 else 1e-4 * 1.3 ** (7 * number % 17)
        size = 1 if number < 3 else 1 + 11 * number % 64
        made.add([sign * float(number)], lr=lr, size=size)
    (shares,) = summarise(made.study).importance.values()
    assert next(iter(shares)) == "model.lr"
    assert sum(shares.values()) == pytest.approx(1.0)


def test_every_objective_has_what_decides_about_it(begun):
    made = begun(TWO)
    for number in range(20):
        lr, size = 1e-3 * (1 + number % 6), 1 + 3 * (number // 2)
        made.add([1e3 * lr, -1.0 * size], lr=lr, size=size)
    found = summarise(made.study).importance
    assert [next(iter(shares)) for shares in found.values()] == ["model.lr", "optimization.cache.size"]


def test_importance_wants_trials_that_count(begun):
    made = begun(more="constraints: {perf/update_ms: {max: 5}}\n")
    for number in range(FEWEST_DECIDE - 1):
        made.add([float(number)], lr=1e-4 * (1 + number))
    made.add([99.0], excess={"perf/update_ms": 1.0})
    made.add(state=FAIL, cause="failed")
    assert summarise(made.study).importance == {}
    made.add([5.0])
    assert summarise(made.study).importance.keys() == {"eval/return"}


def test_the_worth_of_a_stage_is_the_difference_of_medians_with_its_interval(begun):
    made = begun()
    on, off = [5.0, 6.0, 7.0, 8.0, 90.0], [1.0, 2.0, 2.5, 3.0, 4.0]
    for value in on:
        made.add([value], size=3)
    for value in off:
        made.add([value])
    made.add([1e6], excess={"perf/update_ms": 1.0})  # does not count
    made.add([1e6], state=PRUNED, cause="pruned", size=3)
    (worth,) = summarise(made.study).worth
    assert (worth.stage, worth.objective) == ("cache", "eval/return")
    assert (worth.on, worth.off) == (statistics.median(on), statistics.median(off)) == (7.0, 2.5)
    assert (worth.trials_on, worth.trials_off) == (5, 5)
    assert 1.0 <= worth.low <= worth.on - worth.off <= worth.high <= 89.0
    assert summarise(made.study).worth == [worth]


def test_a_stage_that_was_rarely_on_or_off_is_worth_nothing_yet(begun):
    made = begun()
    for number in range(6):
        made.add([float(number)], size=3 if number < FEWEST - 1 else None)
    assert summarise(made.study).worth == []


def test_what_the_runner_takes_and_what_others_took_is_said(begun):
    made = begun()
    for overhead, others in ((1.0, 0.0), (3.0, DISTURBED + 0.05), (9.0, DISTURBED)):
        made.add([1.0], kept={OVERHEAD: overhead, NEIGHBOURS: others})
    made.add([1.0])
    found = summarise(made.study)
    assert (found.overhead_s, found.disturbed) == (3.0, 1)


def test_trials_beyond_a_budget_that_was_lowered_count_if_they_were_begun(begun, tmp_path, store):
    made = begun(more="budget: {trials: 4}\n")
    for value in (1.0, 2.0, 3.0):
        made.add([value], kept={RECIPE: {"name": "mine-0000"}})
    made.study.enqueue_trial({})
    study = store.create(read(tmp_path, study_text(SPACE, AIMS, "budget: {trials: 1}\n")))
    found = summarise(study)
    assert [row.number for row in found.rows] == [0, 1, 2]
    assert [row.number for row in found.best] == [2]
    assert found.seconds_left == 0
    assert recipe_text(found, 2).startswith("# Trial 2 of study mine: eval/return 3.\n")


def test_the_data_is_one_json_object(begun):
    made = begun(TWO)
    for number in range(5):
        made.add([1.0 + number, 2.0], size=number or None)
    found = json.loads(json.dumps(summarise(made.study).data(), allow_nan=False))
    assert found["best"] == [4]
    assert found["rows"][2]["settings"] == {"optimization.cache": "on", "model.lr": 1e-3, "optimization.cache.size": 2}
    assert found["used"]["trials"] == 5


def test_the_report_of_a_study_is_a_folder_with_the_best_recipes(begun, tmp_path):
    made, folder = begun(TWO), tmp_path / "report"
    for values in ([1.0, 1.0], [2.0, 2.0], [0.5, 9.0]):
        made.add(values, kept={RECIPE: made.definition.recipe.values()})
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "trial-0007.yaml").write_text("of an earlier report")
    files = write_report(summarise(made.study), folder)
    assert [path.relative_to(folder).as_posix() for path in files] == [
        *(
            "report.html",
            "progress.png",
            "front.png",
            "slice-cache.png",
            "slice-model.lr.png",
            "best/trial-0001.yaml",
            "best/trial-0000.yaml",
        ),
    ]
    assert sorted(path.name for path in (folder / "best").iterdir()) == ["trial-0000.yaml", "trial-0001.yaml"]
    assert "img" in (folder / "report.html").read_text()
    assert load(files[-1], (), FakeCatalog()).values() == made.definition.recipe.values()


def test_a_study_without_values_says_so_instead_of_pictures(begun, tmp_path):
    made = begun()
    made.add(state=FAIL, cause="failed", reason="ValueError: planted")
    (report,) = write_report(summarise(made.study), tmp_path / "report")
    text = report.read_text()
    assert NO_VALUES in text
    assert NO_PLOTS.partition(":")[2] not in text
