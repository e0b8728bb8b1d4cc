"""Trainings that keep to a memory budget."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from process_pairs import PLUGINS, tiny_recipe
from running import tiny, train_here
from typer.testing import CliRunner

from runner.ablation.experiment import Case, Experiment, keep_budgets
from runner.cli import app
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import read_lock
from runner.recipe.yaml_nodes import RecipeError
from runner.study.trial_run import TrialRun
from runner.training.budget import keep_budget
from runner.training.planning import plan_memory

LEARNERS = ("images", "tokens", "gan")
"""Recipes of the tiny learners."""


@cache
def plan_of(name):
    """Returns the plan of a recipe without a budget."""
    return plan_memory(tiny_recipe(name), PLUGINS)


def budgeted(name, size, fit=None):
    budget = size if fit is None else f"{{size: {size}, fit: {str(fit).lower()}}}"
    return tiny_recipe(name, f"train.memory_budget={budget}")


@pytest.mark.parametrize("name", LEARNERS)
def test_a_plan_that_exceeds_the_budget_is_refused_with_its_table(name):
    need = plan_of(name).peak
    with pytest.raises(RecipeError) as error:
        keep_budget(budgeted(name, f"{need - 1} B"), Registry(PLUGINS))
    message = str(error.value)
    assert "train.memory_budget" in message
    for word in ("exceeds", "parameters", "activations", "by module", "fit: true"):
        assert word in message


@pytest.mark.parametrize("name", LEARNERS)
def test_a_plan_that_fits_changes_nothing(name):
    need = plan_of(name).peak
    for fit in (None, False, True):
        recipe = budgeted(name, f"{need} B", fit)
        fitted = keep_budget(recipe, Registry(PLUGINS))
        assert fitted.recipe is recipe
        assert not fitted.notes


@pytest.mark.parametrize("name", LEARNERS)
def test_a_model_that_is_larger_than_the_budget_is_refused_without_a_search(name, monkeypatch):
    monkeypatch.setattr("runner.training.budget._sets", None)
    with pytest.raises(RecipeError, match=r"parameters and optimizers alone take .*; make the model smaller"):
        keep_budget(budgeted(name, "1 KB", fit=True), Registry(PLUGINS))


@pytest.mark.parametrize("name", LEARNERS)
def test_what_no_stage_can_save_is_refused(name):
    resident = plan_of(name).resident
    with pytest.raises(RecipeError, match="the least that was found"):
        keep_budget(budgeted(name, f"{resident + 1} B", fit=True), Registry(PLUGINS))


def test_the_fastest_stages_that_fit_are_switched_on():
    share = 0.8
    sizes = ("train.batch_size=16", "model.layers=3", "optimization.amp=off")
    without = plan_memory(tiny("shakespeare_gpt", *sizes))
    size = f"{int(share * without.peak)} B"
    recipe = tiny("shakespeare_gpt", *sizes, f"train.memory_budget={{size: {size}, fit: true}}")
    fitted = keep_budget(recipe, Registry())
    added = fitted.recipe.stages.keys() - recipe.stages.keys()
    assert added == {"gradient_accumulation"}
    assert plan_memory(fitted.recipe).peak <= share * without.peak
    assert any("gradient_accumulation" in note for note in fitted.notes)


@pytest.mark.usefixtures("migrated_workspace")
def test_the_choice_is_in_the_lock_and_a_run_of_the_lock_uses_it():
    sizes = ("train.batch_size=16", "model.layers=3", "optimization.amp=off")
    need = plan_memory(tiny("shakespeare_gpt", *sizes)).peak
    budget = f"train.memory_budget={{size: {int(0.8 * need)} B, fit: true}}"
    result = train_here("shakespeare_gpt", *sizes, "train.tokens=512", budget)
    lock = read_lock(Path(result.lock))
    chosen = lock["recipe"]["optimization"]["gradient_accumulation"]
    assert chosen["micro_batch"] < 16
    again = load(result.lock, [], Registry())
    assert keep_budget(again, Registry()).recipe is again
    assert again.stages["gradient_accumulation"].micro_batch == chosen["micro_batch"]


@pytest.mark.parametrize("budget", ["6", "lots", "{fit: true}", "{size: 6GiB, fits: true}", "6.5", "[6GiB]", "true"])
def test_a_budget_that_is_no_size_is_refused(budget):
    with pytest.raises(RecipeError, match=r"train\.memory_budget"):
        load("digits_classifier", [f"train.memory_budget={budget}"], Registry())


@pytest.mark.parametrize("name", LEARNERS)
def test_a_recipe_without_a_budget_has_the_digest_that_it_had(name):
    assert "memory_budget" not in tiny_recipe(name).values()["train"]


GPT = ("train.batch_size=16", "model.layers=3", "optimization.amp=off")


@pytest.fixture(scope="module")
def gpt_budgets():
    """Budgets of a small GPT that need a stage, and that no stage can meet."""
    plan = plan_memory(tiny("shakespeare_gpt", *GPT))
    return {"fits": f"{int(0.8 * plan.peak)} B", "refused": f"{plan.resident // 2} B"}


def settings_with(size):
    return (*GPT, f"train.memory_budget={{size: {size}, fit: true}}")


def fit_experiment(size):
    recipe = tiny("shakespeare_gpt", *settings_with(size))
    experiment = Experiment(Path(), None, (Case("", recipe, (), {}),))
    notes = []
    (case,) = keep_budgets(experiment, Registry(), notes.append).cases
    return case.recipe, notes


def fit_trial(size):
    registry = Registry()
    recipe = tiny("shakespeare_gpt", *settings_with(size))
    notes = []
    trial = object.__new__(TrialRun)
    trial._definition = SimpleNamespace(recipe_of=lambda settled, seed: recipe, catalog=registry)
    trial._say = notes.append
    return trial._recipe({}), notes


def fit_verification(size):
    path = Path("shakespeare_gpt.yaml")
    tiny_recipe = tiny("shakespeare_gpt", *settings_with(size))
    path.write_text(yaml.safe_dump(tiny_recipe.values(masked=False)))
    verified = []

    def verify_recipe(recipe, *_):
        verified.append(recipe)
        raise RecipeError([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.verify.gate.verify_recipe", verify_recipe)
        outcome = CliRunner().invoke(app, ["verify", str(path)])
    if not verified:
        raise outcome.exception
    return verified[0], [outcome.stderr]


@pytest.mark.parametrize("fit", [fit_experiment, fit_trial, fit_verification])
def test_ablations_trials_and_verifications_have_the_stages_of_a_training(fit, gpt_budgets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, notes = fit(gpt_budgets["fits"])
    assert "gradient_accumulation" in recipe.stages
    assert "gradient_accumulation" in "\n".join(notes)
    with pytest.raises(RecipeError, match=r"train\.memory_budget"):
        fit(gpt_budgets["refused"])
