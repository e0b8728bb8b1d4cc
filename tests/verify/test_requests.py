"""Generation and sampling are compared with the inputs that a server makes."""

import re
from pathlib import Path

import pytest
from running import tiny

from runner.plugin.contract import Close, Exact
from runner.plugin.registry import Registry
from runner.proof import Outcome
from runner.training.pipeline import assemble
from runner.verify.evaluation_checks import answers, same_answers
from runner.verify.gate import Gate
from runner.verify.options import Options
from runner.verify.requests import COUNTS, request_batches

pytestmark = pytest.mark.usefixtures("short_texts")
HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "decoding.py", HERE / "wrong_decoding.py"])
GPT = ("data.synthetic=true", "model.layers=1", "model.width=16", "model.heads=2", "data.context=16")
QUICK = Options(updates=2, horizon=0, budget=0.0)


def compared(name, stage, contract, *sets):
    """The verdict on predictions of requests alone, and their number."""
    gate = Gate(tiny(name, *sets, registry=REGISTRY), REGISTRY, QUICK, lambda _: None)
    first, *asked = gate.baseline.questions
    learner = assemble(gate.baseline.recipe, REGISTRY.files).learner
    count = len(request_batches(learner, first.batch.inputs))
    assert count
    return same_answers(*gate.pair((stage,)).builds(answers), [first, *asked[-count:]], contract), count


@pytest.mark.parametrize("harm", ["first_symbol", "one_more_than_trained", "temperature", "count"])
def test_generation_that_is_wrong_fails(harm):
    verdict, _ = compared("shakespeare_gpt", "decoding", Exact(), *GPT, f"optimization.decoding={{harm: {harm}}}")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert re.search("'predict'|'scores'", verdict.summary)


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


def test_requests_of_equal_groups_come_as_one_batch():
    recipe = tiny("shakespeare_gpt", *GPT, registry=REGISTRY)
    pipeline = assemble(recipe, REGISTRY.files)
    batch = pipeline.source.draw(pipeline.batch_size, pipeline.progress)
    requests = request_batches(pipeline.learner, pipeline.learner.inputs(batch))
    together = [group for group in requests if len(group) > 1]
    assert together
    assert all(len({request.group() for request in group}) == 1 for group in together)
    assert len({request.seed for request in together[0]}) > 1
    assert len({request.temperature for request in together[0]}) > 1


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        ("keys_of_old_positions", Close()),
        ("numbers_of_the_first_text", Exact()),
        ("temperature_of_the_first_text", Exact()),
        ("cold_is_greedy", Close()),
    ],
)
def test_decoders_that_depend_on_other_texts_or_positions_fail(kind, promise):
    verdict, _ = compared("shakespeare_gpt", kind, promise, *GPT, f"optimization.{kind}=on")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert re.search("'predict'|'scores'", verdict.summary)


def test_lengths_are_on_both_sides_of_the_trained_context():
    recipe = tiny("shakespeare_gpt", *GPT, registry=REGISTRY)
    pipeline = assemble(recipe, REGISTRY.files)
    batch = pipeline.source.draw(pipeline.batch_size, pipeline.progress)
    requests = request_batches(pipeline.learner, pipeline.learner.inputs(batch))
    inputs = list(map(pipeline.learner.requested, requests))
    assert {len(each["prompt"][0]) for each in inputs} >= {1, 2, 15, 16, 17}
    assert {each["draws"].shape[1] for each in inputs} >= {*COUNTS}
