"""The verb that says whether stages are harmless, on a small recipe."""

import json
import re

import pytest
from children import start
from running import RECIPES, TINY_UAV, tiny
from words import MIXED, REGISTRY, WORDS, words

from runner.api import Close, Exact, Statistical
from runner.plugin.registry import Registry
from runner.plugins.marl.roles import AgentsRole
from runner.plugins.stages.fused_optimizer import FusedOptimizerConfig
from runner.proof.verdict import Outcome
from runner.system.errors import DivergedError, ExitCode, UsageError
from runner.verify.gate import Gate, verify_recipe
from runner.verify.options import Options
from runner.verify.time_limit import NOT_BEGUN
from runner.verify.timed_gate import quick
from runner.verify.training_plan import TrainingPlan
from runner.verify.training_pool import Trainings
from runner.verify.variants import weakest
from runner.verify.verification import StageVerdict, Verification

WRONG = """
from runner.api import Exact, Stage, StageConfig

class LouderConfig(StageConfig):
    "Scales the critics' loss by 1.001, and says that it is the same."
    kind = "louder"
    implementation = "Louder"
    phase = 1
    wraps = frozenset({"backward"})

    def contract(self, setting):
        return Exact()

class Louder(Stage):
    def attach(self, pipeline):
        pipeline.slots.wrap("backward", lambda step: lambda loss: step(loss * 1.001))
"""


def command(name, *more):
    sets = [part for setting in TINY_UAV for part in ("--set", setting)]
    return ["verify", str(RECIPES / f"{name}.yaml"), "--json", "--updates", "3", "--horizon", "0", *sets, *more]


def test_a_cache_is_the_same_bits(tmp_path):
    child = start(tmp_path, *command("marl_baseline", "--set", "optimization.forward_cache=on"))
    data = child.data()
    assert data["verdict"] == "PASS"
    assert [row["name"] for row in data["stages"]] == ["forward_cache", "all"]
    assert {row["contract"] for row in data["stages"]} == {"Exact"}


def test_a_stage_that_lies_fails_with_exit_code_3_and_is_told_where(tmp_path):
    plugin = tmp_path / "louder.py"
    plugin.write_text(WRONG)
    child = start(tmp_path, *command("marl_baseline", "--plugin", str(plugin), "--set", "optimization.louder=on"))
    assert child.wait() == ExitCode.GATE_FAILED
    (row, whole) = json.loads(child.stdout)["stages"]
    assert row["verdict"] == whole["verdict"] == "FAIL"
    assert "slot" in row["summary"]
    assert "critic" in row["summary"]
    assert "; first diverging operator: aten.mul" in row["summary"]


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("marl_baseline", (), "no stage to verify; switch one on"),
        (
            "marl_phase1",
            ("amp",),
            r"no active stage 'amp' \(the recipe does not turn it on\); choose from: forward_cache",
        ),
    ],
    ids=["no stage at all", "a stage that is not on"],
)
def test_what_cannot_be_verified_is_said(name, stages, message):
    with pytest.raises(UsageError, match=message):
        verify_recipe(tiny(name), REGISTRY, Options(stages=stages), print)


@pytest.mark.usefixtures("copied_children")
def test_trainings_with_paired_seeds_decide_about_a_statistical_stage(monkeypatch):
    """They begin when all that needs none is judged: nobody waits for them before."""
    order = []
    run_checks = Gate._run_checks
    train = Trainings.run
    monkeypatch.setattr(Gate, "_run_checks", lambda self, pair: order.append(pair.stages) or run_checks(self, pair))
    monkeypatch.setattr(Trainings, "run", lambda self, *what: order.append("train") or train(self, *what))
    recipe = words(*MIXED)
    options = Options(updates=2, steps=1, seeds=2, stages=("rounding", "fused_optimizer"), horizon=0)
    report = verify_recipe(recipe, REGISTRY, options, lambda _: None)
    assert order.index(("rounding",)) < order.index(("fused_optimizer",)) < order.index("train")
    row = next(row for row in report.rows if row.name == "rounding")
    assert row.contract == "Statistical"
    if "learns nothing" not in row.summary:
        assert row.evidence["pairs"] == 2
    assert sorted(row.evidence["stages"]["reference"]) == ["fused_optimizer", "heap_retention"]
    assert sorted(row.evidence["stages"]["changed"]) == ["fused_optimizer", "heap_retention", "rounding"]
    assert report.exit_code in (ExitCode.DONE, ExitCode.GATE_FAILED, ExitCode.INCONCLUSIVE)


@pytest.mark.usefixtures("copied_children", "few_checks")
def test_trainings_are_shortened_to_the_budget_and_the_verdict_says_so(monkeypatch):
    monkeypatch.setattr(Trainings, "seconds_left", 1e-4)  # less than any training takes
    # Or they would be over before anybody asks how long they take.
    monkeypatch.setattr(TrainingPlan, "begin", lambda _: False)
    said = []
    recipe = words(*MIXED, "train.updates=null", "train.epochs=20")
    options = Options(updates=2, seeds=2, stages=("rounding",), horizon=0)
    (row,) = verify_recipe(recipe, REGISTRY, options, said.append).rows
    assert row.evidence["length"] == {"epochs": 4}
    assert row.summary.endswith(", after 4 of 20 epochs")
    assert any(re.search(r"room for trainings of 4 epochs; --budget \d+ for all 20", line) for line in said)


TWO = """
from runner.api import Close, Stage, StageConfig

class Settings(StageConfig):
    "Alone it does nothing."
    phase = 1
    wraps = frozenset({"backward"})

    def contract(self, setting):
        return Close()

class FirstConfig(Settings):
    "Says that it is there."
    kind = "first"
    implementation = "First"

class SecondConfig(Settings):
    "Doubles the loss where the other is."
    kind = "second"
    implementation = "Second"

class First(Stage):
    def attach(self, pipeline):
        pipeline.learner.first = True
        pipeline.slots.wrap("backward", lambda step: lambda loss: step(loss))

class Second(Stage):
    def attach(self, pipeline):
        scale = 2.0 if hasattr(pipeline.learner, "first") else 1.0
        pipeline.slots.wrap("backward", lambda step: lambda loss: step(scale * loss))
"""


@pytest.mark.usefixtures("few_checks")
def test_stages_that_are_equal_alone_but_not_together_do_not_stand_for_the_baseline(tmp_path):
    plugin = tmp_path / "two.py"
    plugin.write_text(TWO)
    registry = Registry([WORDS, plugin])

    def equal(*kinds):
        recipe = words(*(f"optimization.{kind}=on" for kind in kinds), registry=registry)
        return Gate(recipe, registry, Options(updates=2, horizon=0), lambda _: None).plan.equal

    assert equal("first") == ("first",)
    assert equal("first", "second") == ()


@pytest.mark.usefixtures("few_checks")
@pytest.mark.parametrize("trains", ["affordable", "statistical"])
def test_a_change_with_which_a_training_diverges_fails(trains, monkeypatch):
    def diverges(*_):
        raise DivergedError("step 12: slot 'critic_step': 'critic_loss' is nan")

    monkeypatch.setattr(TrainingPlan, "begin", lambda _: False)
    monkeypatch.setattr("runner.verify.training_plan.affordable", lambda *_: 1)
    monkeypatch.setattr(f"runner.verify.training_plan.{trains}", diverges)
    options = Options(updates=2, stages=("rounding",), horizon=0)
    (row,) = verify_recipe(words(*MIXED), REGISTRY, options, lambda _: None).rows
    assert row.verdict is Outcome.FAIL
    assert "a training with it diverged: step 12: slot 'critic_step'" in row.summary


def test_changes_that_have_trainings_of_their_own_share_the_budget():
    rounding = ("optimization.amp=off", "optimization.rounding=on")
    recipe = tiny("marl_phase2", "optimization.batch_autotune=on", *rounding, registry=REGISTRY)

    def changes(*stages):
        gate = Gate(recipe, REGISTRY, Options(updates=2, horizon=0, stages=stages), lambda _: None)
        return gate.plan.count_changes(("forward_cache", "merged_critic_loss", "stacked_agents"))

    assert changes("rounding") == 1
    assert changes("all") == 1
    assert changes() == 3


def test_without_time_to_train_nothing_is_claimed():
    verdict = quick(words(*MIXED), REGISTRY, ("rounding",))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "no training was started" in verdict.summary


def test_a_stage_that_keeps_more_than_it_promises_needs_no_training(monkeypatch):
    monkeypatch.setattr(FusedOptimizerConfig, "contract", lambda *_: Statistical())
    verdict = quick(words("optimization.fused_optimizer=on"), REGISTRY, ("fused_optimizer",))
    assert (verdict.outcome, verdict.contract) == (Outcome.PASS, "Close")
    assert "needs no training to see" in verdict.summary


def test_recorded_batches_say_nothing_about_a_stage_that_chooses_batches(monkeypatch):
    monkeypatch.setattr(FusedOptimizerConfig, "prepares", True)
    monkeypatch.setattr(FusedOptimizerConfig, "contract", lambda *_: Statistical())
    verdict = quick(words("optimization.fused_optimizer=on"), REGISTRY, ("fused_optimizer",))
    assert verdict.summary == f"{NOT_BEGUN}; 'runner verify' trains"
    monkeypatch.setattr(FusedOptimizerConfig, "contract", lambda *_: Close())
    verdict = quick(words("optimization.fused_optimizer=on"), REGISTRY, ("fused_optimizer",))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "fused_optimizer changes which batches are sampled" in verdict.summary


SPREADING = """
from runner.api import {contract}, Stage, StageConfig
from runner.plugins.marl.roles import AgentsRole

class SpreadingConfig(StageConfig):
    "Steps optimizers twice, whoever asks, and says that it is the same."
    kind = "spreading"
    implementation = "Spreading"
    phase = 1
    wraps = frozenset({{"backward"}})

    def contract(self, setting):
        return {contract}()

class Spreading(Stage):
    def attach(self, pipeline):
        pipeline.slots.wrap("backward", lambda step: lambda loss: step(loss))
        step = AgentsRole.step

        def twice(role, *args):
            step(role, *args)
            step(role, *args)

        AgentsRole.step = twice
"""


@pytest.mark.usefixtures("changed_process")
@pytest.mark.parametrize("contract", ["Exact", "Close"])
def test_a_stage_that_changes_the_whole_process_fails_and_nothing_passes_after_it(contract, tmp_path, monkeypatch):
    monkeypatch.setattr(AgentsRole, "step", AgentsRole.step)
    plugin = tmp_path / "spreading.py"
    plugin.write_text(SPREADING.format(contract=contract))
    registry = Registry([plugin])
    recipe = tiny("marl_phase1", "optimization.spreading=on", registry=registry)
    options = Options(updates=2, horizon=0, stages=("spreading", "all"), names_operators=False)
    report = verify_recipe(recipe, registry, options, lambda _: None)
    found = {row.name: row for row in report.rows}
    order = [*found]
    assert found["spreading"].verdict is Outcome.FAIL
    assert "the change reaches the baseline, too: update 1, slot 'step'" in found["spreading"].summary
    later = order[order.index("spreading") + 1 :]
    assert "all" in later
    for name in later:
        assert found[name].verdict is Outcome.INCONCLUSIVE
        assert "spreading has changed global state of the process" in found[name].summary
    assert quick(recipe, registry, ("forward_cache",)).outcome is Outcome.INCONCLUSIVE  # for another gate, too


@pytest.mark.usefixtures("changed_process", "few_checks")
def test_what_is_judged_for_a_training_is_not_blamed_on_the_stage_that_is_to_be_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(AgentsRole, "step", AgentsRole.step)
    plugin = tmp_path / "spreading.py"
    plugin.write_text(SPREADING.format(contract="Exact").replace("phase = 1", "phase = 3"))
    registry = Registry([plugin, *REGISTRY.files])
    recipe = tiny("marl_baseline", "optimization.rounding=on", "optimization.spreading=on", registry=registry)
    options = Options(updates=2, steps=1, seeds=2, horizon=0, stages=("rounding", "spreading"), names_operators=False)
    rounding, spreading = verify_recipe(recipe, registry, options, lambda _: None).rows
    assert rounding.verdict is Outcome.INCONCLUSIVE
    assert "spreading has changed global state of the process" in rounding.summary
    assert spreading.verdict is Outcome.FAIL


def test_what_several_stages_promise_is_what_the_weakest_does():
    recipe = tiny("marl_phase2")
    assert weakest(recipe, ()) == Exact()
    assert isinstance(weakest(recipe, ("forward_cache", "stacked_agents")), Close)
    assert isinstance(weakest(recipe, ("amp", "stacked_agents")), Statistical)


@pytest.mark.parametrize(
    ("outcomes", "code"), [(("PASS", "PASS"), 0), (("PASS", "INCONCLUSIVE"), 4), (("INCONCLUSIVE", "FAIL"), 3)]
)
def test_the_worst_verdict_is_the_exit_code(outcomes, code):
    rows = tuple(StageVerdict("x", ("x",), "Exact", Outcome(each), "because", {}) for each in outcomes)
    assert Verification("r", rows, {}, 1.0).exit_code == code


def test_a_gate_judges_a_close_stage_by_algebra():
    recipe = tiny("marl_phase2", "model.hidden=[8]", "data.episode_limit=8", "data.evaluation.episodes=2")
    gate = Gate(recipe, REGISTRY, Options(updates=2, horizon=0), lambda _: None)
    verdict = gate(("forward_cache", "merged_critic_loss", "stacked_agents"))
    assert verdict, verdict.summary
    assert verdict.contract == "Close"
