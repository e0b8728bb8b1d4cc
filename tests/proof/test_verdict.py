import importlib
import json
import math
import pkgutil
from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st

import runner.proof
from runner.proof import Difference, Outcome, Verdict, worst

OUTCOMES = st.lists(st.sampled_from(Outcome))


@given(OUTCOMES)
def test_the_worst_is_a_failure_then_doubt_then_a_pass(outcomes):
    order = [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL]
    assert worst(outcomes) is max(outcomes, key=order.index, default=Outcome.PASS)


def test_only_a_pass_is_true_and_an_assert_prints_the_reason():
    for outcome in Outcome:
        verdict = Verdict(outcome, "Exact", "because")
        assert bool(verdict) is (outcome is Outcome.PASS)
        assert str(verdict) == repr(verdict) == f"{outcome} (Exact): because"


@given(st.floats(), st.floats(), st.integers(0, 10), st.text())
def test_evidence_is_json_whatever_the_numbers(absolute, relative, update, remark):
    data = Difference(update, "forward", "loss", absolute, relative, 1, remark).data()
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_a_difference_says_when_where_what_and_how_much():
    assert str(Difference(3, "critic_step", "w.grad", 0.5, 0.25, 1200)) == (
        "update 3, slot 'critic_step': 'w.grad' differs by 0.5 (0.25 of its size) in 1,200 elements"
    )
    assert str(Difference(0, "step", "model.w", 1.0, 1.0, 1)).startswith(
        "before the first update: 'model.w' differs by"
    )
    assert str(Difference(1, "step", "loss", math.inf, math.inf, 0, "is missing")).endswith("'loss' is missing")


def test_no_module_takes_the_place_of_a_public_name():
    for module in pkgutil.iter_modules(runner.proof.__path__, "runner.proof."):
        importlib.import_module(module.name)
    assert [name for name in runner.proof.__all__ if isinstance(getattr(runner.proof, name), ModuleType)] == []
