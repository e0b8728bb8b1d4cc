"""``algorithm_search`` and ``plan_cache`` in trainings: choices are a part of the run."""

import json
import signal
from pathlib import Path

import pytest
import torch
from children import start
from interrupted import learnt, same
from running import NoDisplay, settings_of, tiny

from runner.plugin.registry import Registry
from runner.plugin.tuning import Tuning
from runner.plugins.vision.convolution.key import ConvKey
from runner.plugins.vision.convolution.plan import ConvPlan, Needs
from runner.plugins.vision.convolution.plan_file import FilePlans
from runner.plugins.vision.convolution.search import Search, SearchResult
from runner.plugins.vision.stages.plan_cache import PlanCacheConfig
from runner.recipe.loader import load
from runner.recipe.lock import read_lock
from runner.system.errors import UsageError
from runner.system.tuning_machine import tuning_machine
from runner.tracking import Workspace
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.step import Step

pytestmark = pytest.mark.usefixtures("migrated_workspace")
NAME = "digits_classifier"
SEARCH = "optimization.algorithm_search=on"
SHORT = (
    "optimization.compile=off",
    "data.limit={train: 0.2, held_out: 0.1}",
    "train={epochs: 4, batch_size: 64, log_every: 1, evaluate_every: 2, checkpoint_every: 1}",
)


@pytest.fixture
def selecting(monkeypatch):
    """Searches that select ``im2col`` where it is legal, without timing; returns the keys of all of them."""
    keys = []

    def run(search):
        keys.append((search.key, search.needs))
        names = {
            direction: "im2col" if any(b.name == "im2col" for b in search.candidates(direction)) else "native"
            for direction in search.needs.directions
        }
        return SearchResult(ConvPlan(**names), "", seconds=0.01)

    monkeypatch.setattr(Search, "run", run)
    return keys


def cache(folder):
    return f"optimization.plan_cache={{folder: {folder}}}"


def recipe_of(*sets):
    return tiny(NAME, SEARCH, *SHORT, *sets)


def trained(*sets):
    return run(recipe_of(*sets), Registry(), Workspace(), NoDisplay())


def numbers(result):
    """What was learnt, without Python's generator, from which the first run of a process may draw."""
    state, history = learnt(result)
    return {name: value for name, value in state.items() if not name.startswith("/generators/python/")}, history


def plans_of(lock):
    return read_lock(Path(lock))["tuning"]["choices"]["algorithm_search"]


def test_the_lock_has_the_plans_and_its_run_does_not_search(selecting):
    first = trained()
    plans = plans_of(first.lock)
    assert len(plans) == len(selecting) == len(set(selecting))
    assert any("im2col" in plan.values() for plan in plans.values())
    assert {Needs(True, True), Needs(False, False)} <= {needs for _, needs in selecting}
    assert all(key.threads == torch.get_num_threads() for key, _ in selecting)

    searched = len(selecting)
    second = run(load(first.lock, (), Registry()), Registry(), Workspace(), NoDisplay())
    assert len(selecting) == searched
    assert plans_of(second.lock) == plans
    same(numbers(first.data()), numbers(second.data()))


def test_an_evaluation_of_another_process_uses_the_plans_of_the_run(selecting):
    from runner.tracking.workspace import RunFolder
    from runner.training.evaluate import evaluate

    result = trained()
    searched = len(selecting)
    recipe = load(result.lock, (), Registry())
    evaluation = evaluate(recipe, Registry(), RunFolder(Path(result.run_dir)), "last")
    assert evaluation.metrics == {
        name.removeprefix("eval/"): value for name, value in result.metrics.items() if name.startswith("eval/")
    }
    assert len(selecting) == searched


def test_plans_of_the_cache_are_used_and_become_choices_of_the_run(selecting, tmp_path):
    first = trained(cache(tmp_path / "plans"))
    searched = len(selecting)
    assert searched > 0
    second = trained(cache(tmp_path / "plans"))
    assert len(selecting) == searched
    assert plans_of(first.lock) == plans_of(second.lock)
    reports = {report.kind: report for report in second.stages}
    assert reports["plan_cache"].active
    assert f"{searched} from the cache" in reports["algorithm_search"].notes[0]


def test_a_fresh_pipeline_uses_and_leaves_no_file(selecting, tmp_path):
    trained(cache(tmp_path))
    (path,) = tmp_path.glob("*.json")
    before = path.read_bytes()
    searched = len(selecting)
    tuning = Tuning(tuning_machine(torch.device("cpu")), is_fresh=True)
    step = Step(assemble(recipe_of(cache(tmp_path)), tuning=tuning))
    step()
    assert len(selecting) > searched
    assert path.read_bytes() == before


def test_a_cache_without_a_search_has_nothing_to_do(tmp_path):
    reports = assemble(tiny(NAME, cache(tmp_path), "optimization.compile=off")).reports
    assert reports["plan_cache"].reason == "no stage searches for plans, and torch caches its plans"
    every_call = "optimization.algorithm_search={search_every_call: true}"
    reports = assemble(tiny(NAME, every_call, cache(tmp_path), "optimization.compile=off")).reports
    assert "searches again at each call" in reports["plan_cache"].reason


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"set optimization\.plan_cache\.folder") as refusal:
        assemble(recipe_of(cache(tmp_path / "file" / "folder")))
    assert "\n" not in str(refusal.value)


def test_a_killed_run_is_resumed_with_its_plans(selecting, tmp_path, isolated_workspace):
    """Its plans come from a cache whose plans are others when it is resumed."""
    probe = trained()
    folder = tmp_path / "plans"
    machine = tuning_machine(torch.device("cpu"))
    plans = FilePlans(folder, machine)
    for key, plan in plans_of(probe.lock).items():
        plans.put(key, plan)
    sets = [*settings_of(NAME), SEARCH, *SHORT, cache(folder)]
    command = ["run", NAME, "--quiet", "--json", *(part for setting in sets for part in ("--set", setting))]
    before = set(isolated_workspace.glob("runs/*"))
    killed = start(tmp_path, *command, RUNNER_FAULTS="checkpoint.renamed=kill@2")
    assert killed.wait() == -signal.SIGKILL, killed.stderr
    (run_dir,) = set(isolated_workspace.glob("runs/*")) - before
    for key, plan in plans_of(probe.lock).items():
        plans.put(key, dict.fromkeys(plan, "native"))
    resumed = start(tmp_path, "resume", run_dir.name, "--quiet", "--json")
    result = resumed.data()
    assert "not resumed bit for bit" not in resumed.stderr
    assert plans_of(result["lock"]) == plans_of(probe.lock)
    same(numbers(result), numbers(probe.data()))


def test_an_original_without_a_cache_searches_at_every_call(selecting):
    pipeline = assemble(
        tiny(NAME, "optimization.algorithm_search={search_every_call: true}", "optimization.compile=off")
    )
    step = Step(pipeline)
    counts = []
    for _ in range(3):
        step()
        counts.append(len(selecting))
    assert counts[1] == 2 * counts[0]
    assert counts[2] == 3 * counts[0]
    assert pipeline.tuning.data() == {}


def test_a_folder_in_a_recipe_is_seen_from_the_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("extends: digits_classifier\nname: here\noptimization: {plan_cache: {folder: plans}}\n")
    config = load(path, (), Registry()).stages["plan_cache"]
    assert isinstance(config, PlanCacheConfig)
    assert config.folder == str(tmp_path / "plans")


def test_keys_in_a_lock_are_those_of_convolutions(selecting):
    plans = plans_of(trained().lock)
    keys = [ConvKey.parse(text.partition(" needs=")[0]) for text in plans]
    assert {key.dtype for key in keys} == {"float32"}
    assert json.loads(json.dumps(plans)) == plans
