"""Generation and sampling are compared with the inputs that a server makes."""

from pathlib import Path

import pytest
from running import tiny

from runner.plugin.contract import Close, Exact
from runner.plugin.registry import Registry
from runner.proof import Outcome
from runner.train.assemble import assemble
from runner.verify.gate import Gate
from runner.verify.options import Options
from runner.verify.requests import COUNTS, request_inputs
from runner.verify.surroundings import answers, same_answers

REGISTRY = Registry([Path(__file__).with_name("decoding.py")])
GPT = ("data.synthetic=true", "model.layers=1", "model.width=16", "model.heads=2", "data.context=16")
QUICK = Options(updates=2, horizon=0, budget=0.0)


def compared(name, stage, contract, *sets):
    """The verdict on predictions of requests alone, and their number."""
    gate = Gate(tiny(name, *sets, registry=REGISTRY), REGISTRY, QUICK, lambda _: None)
    first, *asked = gate.baseline.questions
    learner = assemble(gate.baseline.recipe, REGISTRY.files).learner
    count = len(request_inputs(learner, first.batch.inputs))
    assert count
    return same_answers(*gate.pair((stage,)).builds(answers), [first, *asked[-count:]], contract), count


@pytest.mark.parametrize("harm", ["first_symbol", "one_more_than_trained", "temperature", "count"])
def test_generation_that_is_wrong_fails(harm):
    verdict, _ = compared("shakespeare_gpt", "decoding", Exact(), *GPT, f"optimization.decoding={{harm: {harm}}}")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "'predict'" in verdict.summary


@pytest.mark.parametrize(
    ("name", "stage", "sets"),
    [
        ("shakespeare_gpt", "decoding", (*GPT, "optimization.decoding=on")),
        ("shakespeare_gpt", "fused_optimizer", GPT),
        ("digits_classifier", "fused_optimizer", ()),
        ("grasp_diffusion", "fused_optimizer", ("optimization.fused_optimizer=on",)),
    ],
)
def test_correct_stages_pass(name, stage, sets):
    verdict, _ = compared(name, stage, Close(), *sets)
    assert verdict.outcome is Outcome.PASS, verdict


def test_lengths_are_on_both_sides_of_the_trained_context():
    recipe = tiny("shakespeare_gpt", *GPT, registry=REGISTRY)
    pipeline = assemble(recipe, REGISTRY.files)
    batch = pipeline.source.draw(pipeline.batch_size, pipeline.progress)
    inputs = request_inputs(pipeline.learner, pipeline.learner.inputs(batch))
    assert {len(each["prompt"][0]) for each in inputs} >= {1, 2, 15, 16, 17}
    assert {each["draws"].shape[1] for each in inputs} >= {*COUNTS}
