"""The model that is left after a training: restored without stages, and exported."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judging import HERE, judge, pair_of
from running import tiny
from torch import nn

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.verify.checks.trained_model import TrainedModelCheck
from runner.verify.trained_model import export_module, record_calls

pytestmark = pytest.mark.usefixtures("short_texts")
REGISTRY = Registry([HERE / "wrong_trained.py"])
WRONG = {
    "other_when_exported": "an exported program is another one",
    "sizes_of_the_training": "an exported program is another one",
    "packed_for_export": "an exported program is another one",
    "counter_in_the_model": "raises",
    "entry_of_its_own": "cannot be restored without the stages: the checkpoint does not fit this recipe",
    "scale_in_the_model": "raises",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_is_another_one_afterwards_fails(kind):
    verdict = judge(TrainedModelCheck(), kind, REGISTRY)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert WRONG[kind] in verdict.summary


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    [("digits_classifier", "fused_optimizer", "exported"), ("marl_baseline", "forward_cache", "cannot be exported")],
)
def test_correct_stages_pass(name, kind, how):
    verdict = TrainedModelCheck().run(*pair_of(tiny(name, f"optimization.{kind}=on"), kind, Registry()))
    assert verdict, verdict
    assert how in verdict.summary


class Answering:
    """A learner with two modules, of which one calls the other."""

    def __init__(self):
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Sequential(self.inner, nn.ReLU())
        self.named = nn.Identity()

    def modules(self):
        return {"outer": self.outer, "named": self.named}

    def evaluating(self):
        return torch.no_grad()

    def predict(self, inputs):
        self.outer(inputs + 1)
        return self.named(input=self.outer(inputs))


@given(st.integers(1, 9))
def test_the_first_call_of_each_outermost_module_is_recorded(rows):
    calls = record_calls(Answering(), torch.zeros(rows, 3))
    assert [call.name for call in calls] == ["outer"]
    assert torch.equal(calls[0].inputs[0], torch.ones(rows, 3))


class Untraceable(nn.Module):
    def forward(self, values):
        return values if values.sum().item() > 0 else -values


def test_a_module_is_exported_for_other_sizes_unless_it_cannot_be():
    module = nn.Linear(3, 2)
    program = export_module(module, (torch.ones(4, 3),))
    inputs = torch.rand(7, 3)
    torch.testing.assert_close(program(inputs), module(inputs))
    assert export_module(Untraceable(), (torch.ones(4),)) is None


def test_a_name_that_a_program_reserves_is_a_module_that_cannot_be_exported():
    module = nn.Linear(3, 2)
    module.register_buffer("code", torch.ones(2))
    module.forward = lambda values: nn.functional.linear(values, module.weight) * module.code
    assert export_module(module, (torch.ones(4, 3),)) is None
