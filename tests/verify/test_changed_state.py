"""Evaluations of other parameters, which show what was measured once and remembered."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.plugin.contract import Exact
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.proof import Outcome
from runner.recipe.loader import load
from runner.system.tensor_trees import leaves, map_tensors
from runner.verify.changed_state import changed_state
from runner.verify.evaluation_checks import Query, answers, is_evaluation, same_evaluations
from runner.verify.gate import Gate
from runner.verify.options import Options

HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "supervised.py", HERE / "stale.py"])
QUICK = Options(updates=3, horizon=0, budget=0.0, names_operators=False)
UPDATES = 10
"""Updates between the evaluations of the check and after them."""
PERIODS = (0, *range(2, UPDATES + 1))
"""Updates after which a stage measures again: never, or too late. A longer period is never over."""

shapes = st.lists(st.integers(1, 5), max_size=3)
seeds = st.integers(0, 10**6)


def recipe_of(*sets):
    return load(HERE / "supervised.yaml", ["device=cpu", "optimization.stale=on", *sets], REGISTRY)


@pytest.fixture(scope="module")
def gate():
    return Gate(recipe_of(), REGISTRY, QUICK, lambda _: None)


@pytest.fixture
def coarse(gate, monkeypatch):
    """A metric of few digits, as an accuracy has."""
    source = implementation_of(REGISTRY.get("data", "words_and_numbers"))
    evaluate = source.evaluate

    def rounded(self, learner):
        return {name: round(value, 1) for name, value in evaluate(self, learner).items()}

    monkeypatch.setattr(source, "evaluate", rounded)


@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.usefixtures("coarse")
def test_a_metric_that_is_remembered_differs(gate, period, is_cleared):
    recipe = recipe_of(f"optimization.stale={{period: {period}, is_cleared: {is_cleared}}}")
    candidate = answers(recipe, REGISTRY, ("stale",))
    baseline = answers(gate.baseline.recipe, REGISTRY, ())
    asked = gate.baseline.evaluations
    verdicts = [*same_evaluations(gate.baseline.evaluated, baseline, candidate, asked, Exact())]
    assert verdicts[0].outcome is Outcome.FAIL, verdicts
    assert "'evaluate.loss' differs" in verdicts[0].summary


@pytest.mark.usefixtures("coarse")
def test_a_metric_that_is_measured_after_every_update_is_the_same(gate):
    recipe = recipe_of("optimization.stale={period: 1, is_cleared: true}")
    candidate = answers(recipe, REGISTRY, ("stale",))
    baseline = answers(gate.baseline.recipe, REGISTRY, ())
    asked = gate.baseline.evaluations
    verdicts = [*same_evaluations(gate.baseline.evaluated, baseline, candidate, asked, Exact())]
    assert verdicts[0].outcome is Outcome.PASS, verdicts


def test_evaluations_have_other_parameters(gate):
    updates = gate.baseline.evaluations
    assert sum(not isinstance(update.batch, Query) for update in updates) == UPDATES
    loaded = [update for update in updates if update.states is not None]
    assert len(loaded) == 3
    first, changed, again = loaded
    assert all(map(is_evaluation, loaded))
    assert again.states is first.states
    assert changed.states["learner"].keys() == first.states["learner"].keys()


@settings(max_examples=50, deadline=None)
@given(shapes, seeds)
def test_numbers_change_and_keep_their_signs(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    state = {
        "modules": {"weight": values, "mask": values > 0, "zeros": torch.zeros(3)},
        "optimizers": {"first": values, "second": values.square(), "step": torch.tensor(7.0)},
    }
    before = map_tensors(torch.clone, state)
    changed = changed_state(state)
    assert [name for name, _ in leaves(changed)] == [name for name, _ in leaves(state)]
    for (_, value), (_, old) in zip(leaves(state), leaves(before), strict=True):
        assert torch.equal(value, old)
    for (_, value), (_, old) in zip(leaves(changed), leaves(before), strict=True):
        assert torch.equal(torch.sign(value.double()), torch.sign(old.double()))
    weight = changed["modules"]["weight"]
    assert torch.equal(weight, values) == (values.dim() == 0)
    assert changed["optimizers"]["step"] == 7
    if values.dim() and (values < 0).any():
        torch.testing.assert_close(changed["optimizers"]["first"], 100 * weight)
    assert (changed["optimizers"]["second"] <= 1.5 * values.square()).all()
