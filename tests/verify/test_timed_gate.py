import pytest
from running import tiny

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.verify.timed_gate import TimedGate


@pytest.mark.usefixtures("copied_children")
def test_one_process_judges_set_after_set_until_an_answer_takes_too_long():
    registry = Registry()
    recipe = tiny("mlp", "optimization.heap_retention=on", "optimization.set_to_none=on", registry=registry)
    with TimedGate() as gate:
        found = gate(recipe, registry, ("heap_retention",), 300.0)
        assert (found.outcome, found.contract) == (Outcome.PASS, "Exact")
        child = gate._child
        assert gate(recipe, registry, ("heap_retention", "set_to_none"), 300.0)
        assert gate._child is child
        late = gate(recipe, registry, ("set_to_none",), 0.0)
        assert (late.outcome, late.contract) == (Outcome.INCONCLUSIVE, "Exact")
        assert late.summary == "no verdict within the 0 s that were left"
        assert gate(recipe, registry, ("set_to_none",), 300.0)  # by another process
        assert gate._child is not child


DIES = """
import os
from runner.api import Exact, Stage, StageConfig

class DiesConfig(StageConfig):
    kind, phase, wraps = "dies", 1, frozenset({"update"})
    implementation = "Dies"
    def contract(self, setting):
        return Exact()

class Dies(Stage):
    def attach(self, pipeline):
        os._exit(3)
"""


@pytest.mark.usefixtures("copied_children")
def test_a_stage_that_ends_the_process_ends_that_of_the_gate_alone(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    registry = Registry([tmp_path / "dies.py"])
    recipe = tiny("marl_baseline", "optimization.dies=on", registry=registry)
    with TimedGate() as gate:
        found = gate(recipe, registry, ("dies",), 300.0)
    assert (found.outcome, found.contract) == (Outcome.INCONCLUSIVE, "Exact")
    assert found.summary.startswith("it cannot be judged: it ended with exit code 3")
