"""Evaluations of the test part are compared where a source has one."""

from pathlib import Path

import pytest
from judging import pair_of

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.verify.checks.evaluations import EvaluationsCheck

HERE = Path(__file__).parent
PLUGIN = """
import contextlib

from runner.api import Close, Exact, Stage, StageConfig


class ValidatingConfig(StageConfig):
    '''Evaluates the validation part in place of the test part.'''

    kind, implementation, phase, wraps = "validating", "Validating", 1, frozenset({"update"})
    replaces: bool = True
    promise: str = "Exact"

    def contract(self, setting):
        return {"Exact": Exact, "Close": Close}[self.promise]()


class Validating(Stage):
    def attach(self, pipeline):
        pipeline.slots.wrap("update", lambda step: lambda *arguments: step(*arguments))
        if self.config.replaces:
            pipeline.source.testing = contextlib.nullcontext
"""


@pytest.mark.parametrize("promise", ["Exact", "Close"])
@pytest.mark.parametrize("replaces", ["true", "false"])
def test_a_stage_that_evaluates_another_part_fails(promise, replaces, tmp_path):
    plugin = tmp_path / "validating.py"
    plugin.write_text(PLUGIN)
    registry = Registry([HERE / "supervised.py", plugin])
    settings = f"{{promise: {promise}, replaces: {replaces}}}"
    sets = ("device=cpu", "data.test=0.2", f"optimization.validating={settings}")
    recipe = load(HERE / "supervised.yaml", sets, registry)
    verdict = EvaluationsCheck().run(*pair_of(recipe, "validating", registry))
    if replaces == "false":
        assert verdict.outcome is Outcome.PASS, verdict
    else:
        assert verdict.outcome is Outcome.FAIL
        assert "'test.loss' differs" in verdict.summary
