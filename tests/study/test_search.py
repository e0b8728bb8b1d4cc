import itertools
import json
import math
import os
import signal
import time

import psutil
import pytest
from children import running, start
from running import TINY_MLP
from searching import ATTEMPTS, SETS, came_to, search, trials_of, write_plugin, write_study
from toy_runs import TOYS, written
from typer.testing import CliRunner

from runner.cli.study import app
from runner.plugin.registry import Registry
from runner.study import trial_run
from runner.study.config import StudyConfig
from runner.study.definition import load_study
from runner.study.logged_values import excesses
from runner.study.store import StudyStore
from runner.system.errors import UsageError
from runner.tracking import Workspace
from runner.tracking.listing import listing
from runner.tracking.store import params_of

pytestmark = pytest.mark.long


def queue(path, *wanted, plugins=()):
    """Puts these settings into the queue of a study that has not begun."""
    definition = load_study(path, (), Registry(plugins))
    study = StudyStore.open(Workspace()).create(definition)
    for settings in wanted:
        study.enqueue_trial(settings)


def trainings(root, patience=60.0):
    """Processes that have a file of a trial open, when there has been time for them to end."""
    deadline = time.monotonic() + patience
    while left := [each for each in psutil.process_iter() if _has_open(each, str(root / "studies"))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def _has_open(process, folder):
    try:
        return any(file.path.startswith(folder) for file in process.open_files())
    except psutil.Error:
        return False


PLANTED = {
    "memory": ("PRUNED", "out of memory", "GiB of host memory"),
    "hang": ("FAIL", "hung", "no sign of progress for 20 s, after step"),
    "nan": ("PRUNED", "diverged", "'critic_loss' that is not finite"),
    "segfault": ("FAIL", "crashed", "SIGSEGV"),
    "exit": ("FAIL", "crashed", "exit code 0 and without a word"),
    "error": ("FAIL", "failed", "ValueError: planted"),
}


def test_what_goes_wrong_in_a_trial_is_recorded_as_what_it_is_and_the_study_goes_on(tmp_path, migrated_workspace):
    choices = ["off", *({"how": how} for how in PLANTED)]
    path = write_study(
        tmp_path, space={"optimization.plant": {"choice": choices}}, budget={"trials": 7}, retries=0,
        limits={"silence": 20.0, "memory_gib": 1.5},
    )  # fmt: skip
    plugin = write_plugin(tmp_path)
    named = [f"{{how: {how}}}" for how in PLANTED]
    queue(path, *({"optimization.plant": each} for each in [*named, "off"]), plugins=[plugin])
    child = search(tmp_path, path, "--json", "--plugin", str(plugin))
    summary = child.data()
    for row, (how, (state, cause, reason)) in zip(summary["rows"], PLANTED.items(), strict=False):
        assert (how, row["state"], row["cause"]) == (how, state, cause)
        assert reason in row["reason"]
    assert (summary["rows"][6]["state"], summary["best"]) == ("COMPLETE", [6])
    assert summary["causes"] == {"out of memory": 1, "hung": 1, "diverged": 1, "crashed": 2, "failed": 1, "done": 1}
    assert not trainings(migrated_workspace)


def test_a_crash_that_need_not_come_again_is_gone_on_with_from_the_checkpoint(tmp_path, migrated_workspace):
    marker = tmp_path / "crashed"
    plugin = write_plugin(tmp_path)
    settings = {"budget": {"trials": 1}, "set": [*SETS, "train.checkpoint_every=20",
                f"optimization.plant={{how: segfault, marker: {marker}}}"]}  # fmt: skip
    crashing = write_study(tmp_path, "crashing", **settings)
    marker.touch()
    smooth = write_study(tmp_path, "smooth", **settings)
    assert search(tmp_path, smooth, "--plugin", str(plugin)).wait() == 0
    marker.unlink()
    assert search(tmp_path, crashing, "--plugin", str(plugin)).wait() == 0
    (one,), (other,) = trials_of("smooth"), trials_of("crashing")
    assert [each["cause"] for each in other.user_attrs[ATTEMPTS]] == ["crashed", "done"]
    assert came_to([one]) == came_to([other])


POINTS = ("study.claimed", "study.begun", "study.suggested", "study.trained", "study.told")


def test_a_study_that_is_killed_again_and_again_comes_to_the_same(tmp_path, migrated_workspace, monkeypatch):
    settings = {
        "budget": {"trials": 2}, "pruner": {"kind": "median", "startup": 1},
        "set": [*SETS, "train.checkpoint_every=32"],
    }  # fmt: skip
    path = write_study(tmp_path, **settings)
    assert search(tmp_path, path).wait() == 0
    expected = came_to(trials_of())
    assert {state for _, state, *_ in expected} <= {"COMPLETE", "PRUNED"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mlflow.db").write_bytes((migrated_workspace / "mlflow.db").read_bytes())
    monkeypatch.setenv("RUNNER_WORKSPACE", str(elsewhere))
    for point in POINTS:
        child = search(tmp_path, path, RUNNER_FAULTS=f"{point}=kill")
        code = child.wait()
        assert code in (-signal.SIGKILL, 0), child.stderr
    with running(search(tmp_path, path)) as child:
        time.sleep(1.5)
        child.kill()
    assert search(tmp_path, path).wait() == 0
    assert came_to(trials_of(root=elsewhere)) == expected
    assert not trainings(elsewhere)


def test_a_trial_that_was_killed_after_it_was_pruned_stays_pruned(tmp_path, migrated_workspace, monkeypatch):
    written(tmp_path)
    path = write_study(
        tmp_path, recipe="toy.yaml", set=["train.updates=12", "train.evaluate_every=2", "train.checkpoint_every=2"],
        space={"optimizer.lr": {"float": [1e-9, 0.1], "log": True}}, objectives={"eval/loss": "minimize"},
        pruner={"kind": "median", "startup": 1}, budget={"trials": 2},
    )  # fmt: skip
    rates = [{"optimizer.lr": 0.1}, {"optimizer.lr": 1e-9}]
    queue(path, *rates, plugins=[TOYS])
    child = search(tmp_path, path, "--plugin", str(TOYS))
    assert child.wait() == 0, child.stderr
    complete, pruned = trials_of()
    assert (complete.state.name, pruned.state.name) == ("COMPLETE", "PRUNED")
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "elsewhere"))
    queue(path, *rates, plugins=[TOYS])
    visit = len(complete.intermediate_values) + len(pruned.intermediate_values)
    child = search(tmp_path, path, "--plugin", str(TOYS), RUNNER_FAULTS=f"study.judged=kill@{visit}")
    assert child.wait() == -signal.SIGKILL, child.stderr
    child = search(tmp_path, path, "--plugin", str(TOYS))
    assert child.wait() == 0, child.stderr
    again = trials_of(root=tmp_path / "elsewhere")
    assert came_to(again) == came_to([complete, pruned])
    assert again[1].intermediate_values == pruned.intermediate_values


@pytest.mark.parametrize(("values", "is_feasible"), [((2.0, 1.0, 3.0), True), ((3.0, 3.0, 1.0), False)])
def test_a_bound_is_met_by_the_mean_of_the_seeds(values, is_feasible):
    means = {"eval/x": sum(values) / 3}
    config = StudyConfig(
        kind="study", name="mine", recipe="r", space={"model.lr": {"float": [0.0, 1.0]}},
        objectives={"eval/return": "maximize"}, constraints={"eval/x": {"min": 1.9, "max": 2.1}},
    )  # fmt: skip
    rows = [{"eval/x": value} for value in values]
    assert trial_run._mean_by_name(rows) == pytest.approx(means)
    assert (excesses(config, trial_run._mean_by_name(rows))["eval/x"] <= 0) == is_feasible


def test_the_best_recipe_is_one_that_run_accepts_and_that_comes_to_the_same(tmp_path, migrated_workspace):
    path = write_study(tmp_path, budget={"trials": 2})
    summary = search(tmp_path, path, "--json").data()
    (best,) = summary["best"]
    written = CliRunner().invoke(app, ["best", "tiny"])
    assert written.exit_code == 0, written.output
    recipe = tmp_path / "best.yaml"
    recipe.write_text(written.stdout)
    result = start(tmp_path, "run", str(recipe), "--json", "--quiet").data()
    assert result["metrics"]["eval/return"] == summary["rows"][best]["values"]["eval/return"]
    assert summary["rows"][0]["is_recipe"]
    printed = CliRunner().invoke(app, ["show", str(path), "--json"])
    assert printed.exit_code == 0, printed.output
    shown = json.loads(printed.stdout)
    assert shown["rows"] == summary["rows"]
    command = f"optuna-dashboard sqlite:///{migrated_workspace / 'optuna.db'}"
    assert summary["dashboard"] == shown["dashboard"] == command
    assert 0 < summary["overhead_s"] < math.inf
    (report,) = (migrated_workspace / "studies").glob("*/report.html")
    assert f"<code>{command}</code>" in report.read_text()


def test_mlflow_has_one_run_for_the_study_and_one_for_each_trial(tmp_path, migrated_workspace):
    import mlflow

    path = write_study(tmp_path, seeds=2, budget={"trials": 2})
    assert search(tmp_path, path).wait() == 0
    client = mlflow.MlflowClient(f"sqlite:///{migrated_workspace / 'mlflow.db'}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.data.tags["trial"] for run in children) == ["0", "1"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    values = {str(trial.number): trial.value for trial in trials_of()}
    for run in children:
        assert run.data.metrics["eval/return"] == run.data.metrics["objective/eval/return"]
        assert run.data.metrics["objective/eval/return"] == pytest.approx(values[run.data.tags["trial"]])
        seeds = [run.data.metrics[f"seed_{seed}/eval/return"] for seed in (42, 43)]
        assert sum(seeds) / 2 == pytest.approx(values[run.data.tags["trial"]])
        assert run.data.tags["kind"] == "trial"
        assert run.data.params.keys() == params_of(load_study(path, (), Registry()).recipe.values()).keys()
        assert "optimizer.actor.lr=0." in run.data.tags["overrides"]
        use = f"`runner study best tiny --trial {run.data.tags['trial']} > trial.yaml`"
        assert use in run.data.tags["mlflow.note.content"]
        assert run.info.run_name == f"trial {run.data.tags['trial']} of {parent.info.run_name}"
        assert "reason" not in run.data.tags  # there is none
    assert (parent.data.tags["kind"], parent.data.tags["study"], parent.data.tags["trials"]) == ("study", "tiny", "2")
    assert "null" not in parent.data.params.values()
    best = max(values.values())
    assert parent.data.metrics == {"eval/return": best, "objective/eval/return": best}
    assert "FINISHED; 2 of 2 trials; trial " in parent.data.tags["mlflow.note.content"]
    artifacts = {each.path for each in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "progress.png"} <= artifacts
    lacking = children[0]
    client.delete_run(lacking.info.run_id)  # as if MLflow had been away when the trial ended
    trial = migrated_workspace / "studies" / "tiny" / "trials" / f"{int(lacking.data.tags['trial']):04d}"
    for place in (trial / "spool.offset", *trial.glob("seed-*/spool.offset")):
        place.unlink()
    again = search(tmp_path, path)
    assert again.wait() == 0
    shown = " ".join(again.stdout.split()).replace(" \\ ", " ")
    assert f"in a browser: optuna-dashboard sqlite:///{migrated_workspace / 'optuna.db'}" in shown
    query = f"tags.trial = '{lacking.data.tags['trial']}'"
    (sent,) = client.search_runs([lacking.info.experiment_id], query)
    assert (sent.info.status, sent.data.metrics) == ("FINISHED", lacking.data.metrics)
    assert sent.data.params == lacking.data.params


def test_a_signal_ends_the_study_with_a_checkpoint_and_the_same_command_goes_on(tmp_path, migrated_workspace):
    long = [*SETS, "train.env_steps=100_000"]
    path = write_study(tmp_path, set=long, budget={"trials": 2})
    with running(search(tmp_path, path)) as child:
        trial = migrated_workspace / "studies" / "tiny" / "trials" / "0000" / "seed-42"
        while not (trial / "spool.jsonl").exists() or (trial / "spool.jsonl").stat().st_size < 2000:
            assert child.running, child.stderr
            time.sleep(0.05)
        child.send(signal.SIGTERM)
        assert child.wait() == 128 + signal.SIGTERM
    assert "the same command continues" in child.stderr
    assert list((trial / "checkpoints").glob("step-*"))
    first, second = trials_of()
    assert (first.state.name, second.state.name) == ("RUNNING", "WAITING")
    assert not trainings(migrated_workspace)


def test_a_study_ends_with_its_budget_goes_on_with_a_larger_one_and_begins_anew_if_told(tmp_path, migrated_workspace):
    path = write_study(tmp_path, budget={"trials": 5, "device_seconds": 0.1})
    child = search(tmp_path, path, "--json")
    assert child.data()["used"]["trials"] == 1
    assert "the budget of 0.1 s on devices is spent" in child.stderr
    again = search(tmp_path, write_study(tmp_path, budget={"trials": 2}), "--json")
    assert again.data()["used"]["trials"] == 2
    changed = write_study(tmp_path, budget={"trials": 1}, seed=7)
    refused = CliRunner().invoke(app, ["run", str(changed)])
    assert isinstance(refused.exception, UsageError)
    assert "was created with another definition (seed)" in str(refused.exception)
    assert search(tmp_path, changed, "--fresh", "--json").data()["used"]["trials"] == 1


def test_a_study_is_not_continued_with_other_data_or_code(tmp_path, migrated_workspace):
    plugin = tmp_path / "edited.py"
    words = tmp_path / "words.txt"
    words.write_text("5")
    text = TOYS.read_text().replace("* 5 % WORDS", f"* int(open({str(words)!r}).read()) % WORDS")
    plugin.write_text(text)
    written(tmp_path)

    def outcome(trials, *options):
        space = {"optimizer.lr": {"float": [1e-3, 1e-2]}}
        settings = {"set": ["train.updates=2", "train.evaluate_every=1"], "objectives": {"eval/loss": "minimize"}}
        budget = {"trials": trials}
        path = write_study(tmp_path, recipe="toy.yaml", space=space, budget=budget, **settings)
        child = search(tmp_path, path, "--plugin", str(plugin), *options)
        return child.wait(), child.stderr

    assert outcome(1)[0] == 0
    words.write_text("3")
    code, message = outcome(2)
    assert (code, "the data have changed since study 'tiny' started" in message) == (2, True)
    words.write_text("5")
    assert outcome(2)[0] == 0
    plugin.write_text(text + "\nEDITED = True\n")
    code, message = outcome(3)
    assert (code, "code.edited.py" in message) == (2, True)
    assert len(trials_of()) == 2
    assert outcome(3, "--allow-drift")[0] == 0


def test_the_command_line_may_give_the_budget_and_ls_knows_how_the_study_stands(tmp_path, migrated_workspace):
    child = search(
        tmp_path, write_study(tmp_path, budget={"trials": 99}), "--json", "--budget", "1", "seed=5", FORCE_COLOR="1"
    )
    used = child.data()["used"]
    assert 1 <= used["trials"] < 99
    assert "the budget of 1 s of trials is spent" in child.stderr
    for said in (": training, ", "/99 trials, ", "/1 s", "best so far: eval/return "):
        assert said in child.stderr
    (listed,) = listing(Workspace())
    assert (listed["name"], listed["kind"], listed["status"]) == ("tiny", "study", "FINISHED")
    assert (listed["step"], listed["goal"], listed["unit"]) == (used["trials"], 99, "trials")
    assert listed["overrides"] == {"seed": "5"}
    (objective,) = listed["headline"]
    assert listed["metrics"][objective] == max(trial.value for trial in trials_of() if trial.value is not None)


def test_trials_that_are_timed_take_turns_on_one_machine(tmp_path, migrated_workspace):
    path = write_study(
        tmp_path, objectives={"perf/env_steps_per_second": {"direction": "maximize", "value": "median"}},
        budget={"trials": 2},
    )  # fmt: skip
    workers = [start(tmp_path, "study", "worker", str(path)) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    attempts = sorted((a["begin"], a["end"]) for trial in trials_of() for a in trial.user_attrs[ATTEMPTS])
    assert len(attempts) == 2
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(attempts))


def test_a_configuration_that_fails_its_gate_is_infeasible_instead_of_best(tmp_path, migrated_workspace):
    path = write_study(
        tmp_path, recipe="mlp", set=[*TINY_MLP, "train.epochs=1"], budget={"trials": 2},
        space={"optimization.plant": {"choice": ["off", {"how": "nan"}]}}, objectives={"eval/accuracy": "maximize"},
        constraints={"verify": "pass"},
    )  # fmt: skip
    plugin = write_plugin(tmp_path)
    queue(path, {"optimization.plant": "{how: nan}"}, {"optimization.plant": "off"}, plugins=[plugin])
    summary = search(tmp_path, path, "--json", "--plugin", str(plugin)).data()
    bad, good = summary["rows"]
    assert (bad["state"], bad["cause"], bad["verdict"]) == ("PRUNED", "gate", "FAIL")
    assert (good["state"], good["verdict"], summary["best"]) == ("COMPLETE", "PASS", [1])


def test_a_metric_that_nothing_logs_ends_the_study_with_the_name_that_was_meant(tmp_path, migrated_workspace):
    child = search(tmp_path, write_study(tmp_path, objectives={"eval/retrun": "maximize"}))
    assert child.wait() == 2
    assert "no metric 'eval/retrun' was logged - did you mean 'eval/return'?" in child.stderr
    assert "Traceback" not in child.stderr


def test_parallel_workers_share_a_budget(tmp_path, migrated_workspace):
    path = write_study(tmp_path, budget={"trials": 2, "parallel": 2})
    child = search(tmp_path, path, "--json", FORCE_COLOR="1")
    assert [row["state"] for row in child.data()["rows"]] == ["COMPLETE"] * 2
    for said in ("waiting for the workers", "trial 0: ", ": training, ", "best so far: eval/return "):
        assert said in child.stderr
    assert all(len(trial.user_attrs[ATTEMPTS]) == 1 for trial in trials_of())


def test_plan_says_what_is_tried_and_what_it_costs(tmp_path, migrated_workspace):
    planned = start(tmp_path, "study", "plan", str(write_study(tmp_path)), "--json").data()
    assert [row[0] for row in planned["space"]] == [
        "optimization.forward_cache", "optimization.merged_critic_loss", "optimizer.actor.lr"
    ]  # fmt: skip
    assert (planned["trials"], planned["configurations"]) == (3, None)
    assert 0 < planned["forecast"]["trial_seconds"] < planned["forecast"]["study_seconds"]
    assert not (migrated_workspace / "optuna.db").exists()


def test_a_study_that_does_not_exist_is_named(tmp_path, migrated_workspace):
    child = start(tmp_path, "study", "show", "nosuch")
    assert child.wait() == 2
    assert "no studies in" in child.stderr
    assert os.environ["RUNNER_WORKSPACE"] in child.stderr
    for verb in ("best", "worker"):
        result = CliRunner().invoke(app, [verb, "nosuch"])
        assert isinstance(result.exception, UsageError)
        assert "no studies in" in str(result.exception)
