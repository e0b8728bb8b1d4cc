"""The check of simulators: what it reports about stages that are wrong, and that correct ones pass."""

import random
from itertools import cycle
from pathlib import Path

import pytest
import walkers
from running import RECIPES, settings_of, tiny

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.loader import load
from runner.verify import simulation
from runner.verify.baseline import Baseline
from runner.verify.checks.simulators import SimulatorsCheck
from runner.verify.coverage import Coverage
from runner.verify.gate import Gate
from runner.verify.options import Options
from runner.verify.pair import StagePair
from runner.verify.unexercised import list_unexercised
from runner.verify.variants import contract_of

HERE = Path(__file__).parent
WALKERS = Registry([HERE / "walkers.py"])
FAULTY = Registry([HERE / "simulator_faults.py"])
RUNNERS = (
    "data={kind: runners, envs: 4, warmup: 8, evaluation: {episodes: 3}, replay: {kind: uniform, capacity: 100}}",
    "model={kind: masac, hidden: [8]}",
    "optimization={heap_retention: off}",
)
SMALL_SIZES_ONLY = ("usual number", "acts alike", "masked evaluation")
MANY_FLIGHTS = ("data.envs=256", "data.replay.capacity=8000", "data.episode_limit=200")
CHECK = SimulatorsCheck()


def judge(recipe, registry, *stages, seconds=0.01):
    options = Options(updates=2, horizon_seconds=seconds)
    pair = StagePair(Baseline(recipe, registry, options), stages)
    return CHECK.run(pair, Coverage(0))


def walking(fault="none", promise="exact", *sets, **options):
    faults = (f"optimization.meddling.fault={fault}", f"optimization.meddling.promise={promise}")
    return judge(load(HERE / "walkers.yaml", [*faults, *sets], WALKERS), WALKERS, "meddling", **options)


def collecting(name, fault="none", promise="exact", *sets, **options):
    faults = (f"optimization.faulty.fault={fault}", f"optimization.faulty.promise={promise}")
    recipe = load(RECIPES / f"{name}.yaml", [*settings_of(name), *sets, *faults], FAULTY)
    return judge(recipe, FAULTY, "faulty", **options)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(simulation, "FEWEST_DRAWS", 32)


PROMISES = cycle(("exact", "close", "statistical", "close"))
OF_ANSWERS = "acts alike"
"""A fault of answers alone, which a statistical promise allows."""
CASES = [
    (fault, promise if fault != OF_ANSWERS else "exact")
    for fault, promise in zip(walkers.FAULTS, PROMISES, strict=False)
]


@pytest.mark.parametrize(("fault", "promise"), CASES)
def test_a_simulator_of_a_plugin_is_compared_at_ends_and_in_other_sizes(fault, promise):
    verdict = walking(fault, promise)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "the simulator is another one with envs" in verdict.summary


@pytest.mark.parametrize(
    "fault",
    ["last copy", "stale observation", "new observation", "timeout ends", "success continues", "collision continues",
     "evaluated collisions lost", "seam"],
)  # fmt: skip
def test_the_simulator_of_flights_is_compared_at_its_ends(fault):
    verdict = collecting("marl_baseline", fault, "close", *MANY_FLIGHTS)
    assert verdict.outcome is Outcome.FAIL, verdict


@pytest.mark.parametrize(
    "fault",
    ["last copy", "stale observation", "timeout ends", "ended agents earn", "same episode", "episodes count twice"],
)
def test_a_simulator_whose_agents_end_at_different_times_is_compared(fault):
    verdict = collecting("marl_spread", fault, "exact", *RUNNERS)
    assert verdict.outcome is Outcome.FAIL, verdict


def test_all_events_of_a_correct_stage_are_exercised():
    verdict = collecting("marl_spread", "none", "exact", *RUNNERS)
    assert verdict, verdict
    assert verdict.evidence["not_exercised"] == []
    assert min(verdict.evidence["events"].values()) > 0
    assert {*verdict.evidence["events"]} == {
        "an episode that is terminated",
        "an episode that is truncated",
        "an agent that ends before the others",
        simulation.OVERWRITTEN,
    }


def test_events_that_did_not_occur_are_listed():
    verdict = walking("none", "exact", "data.limit=1000", seconds=0.0)
    pair = StagePair(Baseline(load(HERE / "walkers.yaml", [], WALKERS), WALKERS, Options(updates=2)), ("meddling",))
    pair.results.append((CHECK, verdict))
    assert verdict, verdict
    assert list_unexercised(pair, 2, ()).events == tuple(verdict.evidence["not_exercised"])
    assert str(list_unexercised(pair, 2, ())).endswith("; ".join(verdict.evidence["not_exercised"]))


class AlwaysPasses(Check):
    """Stands for the comparison of updates, which takes seconds."""

    name, question, catches = "updates", "?", ""

    def cost(self, pair):
        return ""

    def run(self, pair, budget):
        return Verdict(Outcome.PASS, pair.promise_name, "the same")


@pytest.mark.parametrize(("fault", "outcome"), [("none", "PASS"), ("second round", "FAIL")])
def test_the_verdict_of_the_gate_contains_the_check_and_its_limits(fault, outcome):
    recipe = load(HERE / "walkers.yaml", [f"optimization.meddling.fault={fault}", "data.limit=1000"], WALKERS)
    gate = Gate(recipe, WALKERS, Options(updates=2, horizon_seconds=0.01), lambda _: None)
    assert any(isinstance(check, SimulatorsCheck) for check in gate.checks)
    gate.checks = [AlwaysPasses(), CHECK]
    verdict = gate(("meddling",))
    assert verdict.outcome is Outcome(outcome), verdict
    assert [result["check"] for result in verdict.evidence["around"]] == ["simulators"]
    if verdict:
        assert "not exercised here: " in verdict.summary
        events = gate.pair(("meddling",)).results[1][1].evidence["not_exercised"]
        assert verdict.evidence["not_exercised"]["events"] == tuple(events) != ()
    else:
        assert "the simulator is another one with envs 3" in verdict.summary


def test_a_size_that_a_stage_refuses_is_listed():
    verdict = walking("refuses one copy")
    assert verdict, verdict
    refused = verdict.evidence["not_exercised"][0]
    assert refused.startswith("a simulator with envs 1, ")
    assert "one copy is too few" in refused


def test_rounding_of_a_simulator_is_no_fault_of_a_stage_that_promises_the_same_algebra():
    assert walking("rounding", "close")
    assert walking("rounding", "exact").outcome is Outcome.FAIL


@pytest.mark.parametrize("fault", ["none", OF_ANSWERS])
def test_a_statistical_stage_may_answer_otherwise_but_not_simulate_otherwise(fault):
    assert walking(fault, "statistical")
    assert walking("rows lost", "statistical").outcome is Outcome.FAIL


def test_a_statistical_stage_that_samples_otherwise_is_not_compared(monkeypatch):
    recipe = load(HERE / "walkers.yaml", ["optimization.meddling.promise=statistical"], WALKERS)
    pair = StagePair(Baseline(recipe, WALKERS, Options(updates=2)), ("meddling",))
    assert CHECK.applies(pair)
    monkeypatch.setattr(WALKERS.get("optimization", "meddling"), "wraps", frozenset({"next_batch"}))
    assert not CHECK.applies(pair)


def random_cases(count):
    """Returns faults with sizes that nobody has listed, always the same."""
    generator = random.Random(5)
    # The others need the sizes that the settings name.
    faults = [fault for fault in walkers.FAULTS if fault not in SMALL_SIZES_ONLY]
    for number in range(count):
        fault = generator.choice(faults)
        promise = generator.choice(("exact", "close"))
        size = generator.randint
        sizes = {"envs": size(2, 9), "walkers": size(2, 4), "limit": size(3, 8), "capacity": size(13, 40)}
        yield fault, promise if number % 3 else "statistical", sizes


EVENTS = {
    "stale observation": (),
    "still resting": ("a success", "a walker that rests before the others"),
    "late timeout": ("a timeout",),
    "timeout ends": ("a timeout",),
    "ignored mask": ("a walker that rests before the others",),
    "failure missed": ("a failure",),
    "rows lost": (simulation.OVERWRITTEN,),
    "second round": (simulation.OVERWRITTEN,),
}
"""Events in which a fault shows; without any, it always does."""


def test_faults_show_in_any_sizes_or_their_events_are_not_exercised(monkeypatch):
    monkeypatch.setattr(WALKERS.get("data", "walkers"), "other_sizes", lambda *_: iter(()))
    undetected = []
    for fault, promise, sizes in random_cases(25):
        sets = (*(f"data.{name}={value}" for name, value in sizes.items()), "train.batch_size=12")
        verdict = walking(fault, promise, *sets)
        if verdict.outcome is not Outcome.FAIL:
            undetected.append((fault, promise, sizes, verdict.evidence))
    assert len(undetected) <= 3
    for fault, *case, evidence in undetected:
        assert {*EVENTS[fault]} & {*evidence["not_exercised"]}, (fault, case, evidence)


@pytest.mark.parametrize("name", ["marl_phase1", "marl_phase3", "marl_spread"])
def test_correct_stages_of_shipped_recipes_pass(name):
    recipe = tiny(name)
    baseline = Baseline(recipe, Registry(), Options(updates=2, horizon_seconds=0.01))
    is_numeric = {kind: isinstance(contract_of(recipe, kind), Exact | Close) for kind in baseline.active}
    pair = StagePair(baseline, tuple(kind for kind in baseline.active if is_numeric[kind]))
    assert len(pair.stages) >= 2
    assert CHECK.applies(pair)
    verdict = CHECK.run(pair, Coverage(0))
    assert verdict, verdict


@pytest.mark.parametrize("name", ["digits_classifier", "marl_baseline"])
def test_only_sources_that_act_are_simulators(name):
    recipe = tiny(name, "optimization.fused_optimizer=on")
    pair = StagePair(Baseline(recipe, Registry(), Options(updates=2)), ("fused_optimizer",))
    assert CHECK.applies(pair) == name.startswith("marl")


def test_the_cost_names_draws_and_sizes():
    recipe = tiny("marl_phase1")
    pair = StagePair(Baseline(recipe, Registry(), Options(horizon_seconds=10.0)), ("forward_cache",))
    assert CHECK.cost(pair) == "60 to 1000 draws in each of 3 sizes, or 4 s"
