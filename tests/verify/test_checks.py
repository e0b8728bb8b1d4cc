"""The checks of the gate: their list, what they explain, and checks of plugins."""

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tiny

from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import UsageError
from runner.verify.checks import CHECKS, checks_of
from runner.verify.checks.trainings import TrainingsCheck
from runner.verify.coverage import Coverage
from runner.verify.explanation import explain, list_checks
from runner.verify.gate import Gate
from runner.verify.options import Options
from runner.verify.time_limit import OutOfTime

DOCS = Path(__file__).parents[2] / "docs"
QUICK = Options(updates=2, horizon=0, budget=0.0, names_operators=False)
FUSED = "optimization.fused_optimizer=on"
STAGED = {
    "marl_phase2": ("Exact", "Close", "Statistical"),
    "digits_classifier": ("Exact", "Close"),
    "graf_memory": ("Exact", "Close"),
}
"""Recipes of three learners with the contracts that their stages promise here."""


def gate_of(registry, name="digits_classifier", *sets):
    return Gate(tiny(name, *sets, registry=registry), registry, QUICK, lambda _: None)


@given(
    st.lists(st.sampled_from(("updates", "a long run", "epoch", "trainings")), min_size=1, unique=True),
    st.lists(st.sampled_from(("amp", "compile", "fused_optimizer")), min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_the_bar_names_the_stages_and_the_check(names, stages, active):
    """Each check runs inside of the phase with its name, and no phase outlasts it."""
    entered, running = [], []

    @contextmanager
    def phase(name):
        running.append(name)
        yield
        running.remove(name)

    def check(name):
        def run(pair, coverage):
            entered.extend(running)
            return Verdict(Outcome.PASS, "Exact", "")

        return SimpleNamespace(name=name, applies=lambda pair: True, run=run, is_optional=False)

    gate = Gate.__new__(Gate)
    gate.phase = phase
    gate.checks = [check(name) for name in names]
    gate.coverage = Coverage(0.0)
    gate.baseline = SimpleNamespace(active=tuple(stages[:active]))
    pair = SimpleNamespace(stages=tuple(stages), results=[], promise_name="Exact")
    with patch("runner.verify.gate.conclude"), patch("runner.verify.gate.note_effects"):
        gate._run_checks(pair)
    title = "all" if len(stages) > 1 and active >= len(stages) else " + ".join(stages)
    assert entered == [f"{title}: {name}" for name in names]
    assert running == []


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data())
@settings(max_examples=60)
def test_a_verdict_without_a_check_that_is_not_optional_is_none(optional, data):
    """Trainings come last: an optional check before them that runs out of time leaves no PASS."""
    last = data.draw(st.integers(0, len(optional) - 1))

    def check(number):
        def run(pair, coverage):
            if number == last:
                raise OutOfTime
            return Verdict(Outcome.PASS, "Exact", "")

        name = f"check {number}"
        return SimpleNamespace(name=name, applies=lambda pair: True, run=run, is_optional=optional[number])

    gate = Gate.__new__(Gate)
    gate.phase = lambda name: nullcontext()
    gate.checks = [check(number) for number in range(len(optional))]
    gate.coverage = Coverage(0.0)
    gate.baseline = SimpleNamespace(active=())
    pair = SimpleNamespace(stages=("amp",), results=[], promise_name="Exact")
    with patch("runner.verify.gate.conclude") as conclude, patch("runner.verify.gate.note_effects"):
        if all(optional[last:]):
            gate._run_checks(pair)
            names = ", ".join(f"check {number}" for number in range(last, len(optional)))
            assert conclude.call_args.args[1] == f"; the budget had no room for {names}"
        else:
            with pytest.raises(OutOfTime):
                gate._run_checks(pair)


def test_the_page_lists_the_checks_in_their_order():
    page = (DOCS / "proof.md").read_text()
    listed = page.partition("<!-- checks -->\n")[2].partition("<!-- end -->")[0]
    assert listed.strip() == list_checks([*CHECKS, TrainingsCheck]).strip()


@pytest.mark.parametrize("check", [*CHECKS, TrainingsCheck])
def test_a_check_says_what_it_asks_and_catches(check):
    assert check.question.endswith("?")
    assert check.name == check.name.lower()
    assert len(check.catches.split()) > 4


def test_names_of_checks_differ():
    names = [check.name for check in (*CHECKS, TrainingsCheck)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("name", STAGED)
def test_checks_and_their_cost_are_explained_without_running_one(name, monkeypatch):
    for check in (*CHECKS, TrainingsCheck):
        monkeypatch.setattr(check, "run", None)
    explanation = explain(tiny(name), Registry(), Options())
    assert [check.name for check in explanation.checks] == [check.name for check in (*CHECKS, TrainingsCheck)]
    assert {*explanation.sets.values()} >= {STAGED[name][0]}
    costs = {check.name: check.costs for check in explanation.checks}
    assert costs["updates"].keys() == {*explanation.sets.values()}
    assert ("Statistical" in explanation.sets.values()) == bool(costs["trainings"])


def test_the_example_of_a_check_runs_between_the_others_and_trainings():
    registry = Registry([DOCS / "example_check.py"])
    gate = gate_of(registry, "digits_classifier", FUSED)
    assert [check.name for check in gate.checks][-2:] == ["parameter types", "trainings"]
    gate.checks = [AlwaysPasses(), *gate.checks[-2:]]
    verdict = gate(("fused_optimizer",))
    assert verdict.outcome is Outcome.PASS, verdict.summary
    results = {result["check"]: result for result in verdict.evidence["around"]}
    assert results["parameter types"]["summary"].endswith("parameters keep their type")


CHANGING = """
from runner.api import Check
from runner.proof import Outcome, Verdict

class Objecting(Check):
    name = "objections"
    question = "Does nobody object?"
    catches = "everything"

    def cost(self, pair):
        return "nothing"

    def run(self, pair, budget):
        return Verdict(Outcome.{outcome}, "Close", "somebody objects")
"""


@pytest.mark.parametrize("outcome", ["FAIL", "INCONCLUSIVE"])
def test_a_verdict_is_as_bad_as_that_of_a_check_of_a_plugin(outcome, tmp_path):
    plugin = tmp_path / "objecting.py"
    plugin.write_text(CHANGING.format(outcome=outcome))
    gate = gate_of(Registry([plugin]), "digits_classifier", FUSED)
    gate.checks = [AlwaysPasses(), *(check for check in gate.checks if check.name == "objections")]
    verdict = gate(("fused_optimizer",))
    assert verdict.outcome is Outcome(outcome)
    assert "somebody objects" in verdict.summary


class AlwaysPasses(Check):
    """Stands for the comparison of updates, which takes seconds."""

    name, question, catches = "updates", "?", ""

    def cost(self, pair):
        return ""

    def run(self, pair, budget):
        return Verdict(Outcome.PASS, "Close", "the same")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("    question", "check Objecting: question missing"),
        ("    catches", "check Objecting: catches missing"),
        ("    def cost(self, pair):\n        return", "check Objecting: cost missing"),
    ],
)
def test_a_check_that_lacks_a_part_is_refused(removed, message, tmp_path):
    text = CHANGING.format(outcome="PASS")
    start = text.index(removed)
    plugin = tmp_path / "incomplete.py"
    plugin.write_text(text[:start] + text[text.index("\n", start + len(removed)) :])
    with pytest.raises(UsageError, match=message):
        gate_of(Registry([plugin]))


def test_a_check_that_an_installed_package_brings_is_found(monkeypatch):
    class EntryPoint:
        name, value, dist = "check.objections", "somewhere:Objecting", None

        def load(self):
            return AlwaysPasses

    registry = Registry(installed=[EntryPoint()])
    assert registry.checks == [AlwaysPasses]
    monkeypatch.setattr(AlwaysPasses, "run", None)
    assert isinstance(checks_of(registry, None)[-2], AlwaysPasses)


def test_an_entry_point_that_is_not_a_check_is_refused():
    class EntryPoint:
        name, value, dist = "check.objections", "somewhere:Objecting", None

        def load(self):
            return Verdict

    with pytest.raises(UsageError, match="Verdict is not a Check"):
        assert Registry(installed=[EntryPoint()]).checks
