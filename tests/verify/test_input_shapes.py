"""Predictions of inputs in other shapes than those of the training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judging import recipe_of
from running import tiny

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.verify import baseline as baseline_module
from runner.verify.evaluation_checks import answers, same_answers
from runner.verify.gate import Gate
from runner.verify.input_shapes import MOST_SHAPES, reshape_inputs
from runner.verify.options import Options

pytestmark = pytest.mark.usefixtures("short_texts")
REGISTRY = Registry([Path(__file__).with_name("wrong_trained.py")])
OPTIONS = Options(updates=2, horizon=0, budget=0.0, names_operators=False)


def wrong(kind):
    return recipe_of(kind, REGISTRY)


def pair_of(recipe, kind):
    return Gate(recipe, REGISTRY, OPTIONS, lambda _: None).pair((kind,))


@pytest.mark.parametrize("kind", ["stretched_images", "mask_of_the_window", "half_windows"])
def test_a_stage_that_is_wrong_for_other_shapes_fails(kind):
    pair = pair_of(wrong(kind), kind)
    first = pair.baseline.questions[0]
    verdict = same_answers(*pair.builds(answers), [first, *pair.baseline.other_shapes], pair.contract)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "'predict' differs" in verdict.summary


@pytest.mark.parametrize("kind", ["short_memory", "first_symbol_lost", "state_of_the_last_text"])
def test_a_decoder_that_is_wrong_around_a_limit_fails(kind):
    pair = pair_of(wrong(kind), kind)
    first, *updates = pair.baseline.questions
    requests = [update for update in updates if update.batch.requests]
    assert len(requests) > 5
    verdict = same_answers(*pair.builds(answers), [first, *requests], pair.contract)
    assert verdict.outcome is Outcome.FAIL, verdict


@pytest.mark.parametrize(("name", "kind"), [("digits_classifier", "fused_optimizer"), ("shakespeare_gpt", "amp")])
def test_correct_stages_pass(name, kind):
    pair = pair_of(tiny(name, f"optimization.{kind}=on"), kind)
    shapes = pair.baseline.other_shapes
    assert shapes
    assert same_answers(*pair.builds(answers), [pair.baseline.questions[0], *shapes], pair.contract)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_all_dimensions_of_one_size_change_together(sizes):
    inputs = {"one": torch.arange(2.0).reshape(2, *[1] * len(sizes)).expand(2, *sizes), "two": torch.ones(2, sizes[0])}
    variants = reshape_inputs(inputs)
    assert len(variants) <= MOST_SHAPES
    for variant in variants:
        shapes = [tuple(tensor.shape) for tensor in variant.values()]
        assert shapes != [(2, *sizes), (2, sizes[0])]
        changes = {(old, new) for old, new in zip(sizes, shapes[0][1:], strict=True)}
        assert len(dict(changes)) == len(changes), "a size has become two"
        assert (sizes[0], shapes[1][1]) in changes
        assert all(new > 0 for _, new in changes)
        assert shapes[0][0] == shapes[1][0] == 2


def test_a_vector_has_no_other_shape():
    assert reshape_inputs(torch.ones(5)) == []


def test_whether_a_model_answers_a_shape_is_found_on_a_cpu(monkeypatch):
    """On a GPU, an index out of range ends the process."""
    devices = []
    recipe = replace(tiny("gcn_cora", "data.synthetic=true"), device="auto")
    baseline = Gate(recipe, Registry(), OPTIONS, lambda _: None).baseline

    def answered(recipe, *arguments):
        devices.append(recipe.device)
        return answers(recipe, *arguments)

    monkeypatch.setattr(baseline_module, "answers", answered)
    assert len(baseline.other_shapes) < len(reshape_inputs(baseline.questions[0].batch.inputs))
    assert devices == ["cpu"]
