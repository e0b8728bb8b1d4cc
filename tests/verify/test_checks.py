"""The checks of the gate: their list, what they explain, and checks of plugins."""

from pathlib import Path

import pytest
from running import tiny

from runner.compare.verdict import Outcome, Verdict
from runner.plugin.check import Check
from runner.plugin.registry import Registry
from runner.system.errors import UsageError
from runner.verify.checks import CHECKS, checks_of
from runner.verify.checks.trainings import TrainingsCheck
from runner.verify.explanation import explain, list_checks
from runner.verify.gate import Gate
from runner.verify.options import Options

DOCS = Path(__file__).parents[2] / "docs"
QUICK = Options(updates=2, horizon=0, budget=0.0)
FUSED = "optimization.fused_optimizer=on"
STAGED = {
    "marl_phase2": ("Exact", "Close", "Statistical"),
    "digits_classifier": ("Exact", "Close"),
    "graf_memory": ("Exact", "Close"),
}
"""Recipes of three learners with the contracts that their stages promise here."""


def gate_of(registry, name="digits_classifier", *sets):
    return Gate(tiny(name, *sets, registry=registry), registry, QUICK, lambda _: None)


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
