from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from trained_classifiers import classifier

from runner.api import Close, Exact, Stage, StageConfig, Statistical
from runner.system.errors import UsageError
from runner.training.inference_model import build
from runner.verify.inference_gate import InferenceGate, verify_inference


class Wrapping(Stage):
    """Puts a function around the network's answers."""

    def attach(self, pipeline):
        self.first = None
        pipeline.slots.wrap("forward", lambda step: lambda *inputs: self.config.changed(self, step(*inputs)))


class _Wrapped(StageConfig):
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})

    implementation = "Wrapping"


def stage(name, promise, change):
    """A stage that promises this, and does that to every answer."""
    body = {
        "kind": name, "__doc__": name, "__annotations__": {"kind": ClassVar[str]},
        "contract": lambda self, setting: promise, "changed": lambda self, works, logits: change(works, logits),
    }  # fmt: skip
    return type(name, (_Wrapped,), body)()


def nothing(works, logits):
    return logits


def rounded_otherwise(works, logits):
    return logits * 3 / 3


def a_little(works, logits):
    return logits + 1e-6


def in_one_size(works, logits):
    return logits * 1.01 if len(logits) == 3 else logits


def remembered(works, logits):
    if works.first is None or works.first.shape != logits.shape:
        works.first = logits
    return works.first


def mixed_up(works, logits):
    return logits.roll(1, dims=1)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("run"))


def judged(found, *stages):
    inference = {each.kind: each for each in stages}
    with_stages = replace(found, recipe=replace(found.recipe, inference=inference))
    return verify_inference(with_stages, (), lambda _: None)


@pytest.mark.parametrize(
    ("promise", "change", "outcome"),
    [
        (Exact(), nothing, "PASS"),
        (Exact(), rounded_otherwise, "FAIL"),
        (Exact(), a_little, "FAIL"),
        (Exact(), in_one_size, "FAIL"),
        (Exact(), remembered, "FAIL"),
        (Close(), rounded_otherwise, "PASS"),
        (Close(), a_little, "FAIL"),
        (Close(), in_one_size, "FAIL"),
        (Close(), remembered, "FAIL"),
        (Statistical(), a_little, "PASS"),
        (Statistical(), mixed_up, "FAIL"),
    ],
)
def test_wrong_stages_fail_and_honest_ones_pass(found, promise, change, outcome):
    report = judged(found, stage(change.__name__, promise, change))
    assert {row.verdict for row in report.rows} == {outcome}, report.rows[0].summary


def test_what_has_no_float64_is_compared_in_its_own_precision(found):
    def single(works, logits):
        if logits.dtype == torch.float64:
            raise RuntimeError("no kernel")
        return logits * 3 / 3

    report = judged(found, stage("single", Close(), single))
    assert report.rows[0].verdict == "PASS"
    assert "1e-05 is allowed" in report.rows[0].summary


def test_what_cannot_be_attached_in_float64_is_compared_in_its_own_precision(found, monkeypatch):
    attach = Wrapping.attach

    def refusing(self, pipeline):
        if torch.get_default_dtype() == torch.float64:
            raise UsageError("no program of this type")
        attach(self, pipeline)

    monkeypatch.setattr(Wrapping, "attach", refusing)
    assert judged(found, stage("refusing", Close(), rounded_otherwise)).rows[0].verdict == "PASS"
    assert judged(found, stage("wrong", Close(), in_one_size)).rows[0].verdict == "FAIL"


def test_each_stage_is_judged_alone_and_then_all(found):
    one, other = stage("one", Exact(), nothing), stage("other", Exact(), remembered)
    report = judged(found, one, other)
    assert {row.name: row.verdict for row in report.rows} == {"one": "PASS", "other": "FAIL", "all": "FAIL"}
    assert report.exit_code == 3


def test_a_recipe_without_the_section_is_told(found):
    with pytest.raises(UsageError, match="has no section 'inference'"):
        InferenceGate(found, lambda _: None)


def test_weights_of_another_model_are_refused(found):
    other = replace(found.recipe, model=replace_kind(found.recipe.model))
    with pytest.raises(UsageError, match="is for model 'other', and here has trained 'classifier'"):
        found.under(other)


def replace_kind(config):
    return type("Other", (type(config),), {"kind": "other", "__annotations__": {"kind": ClassVar[str]}})()


def test_the_model_answers_as_the_run_s_learner(found):
    model, pipeline = build(found, ()), found.pipeline()
    inputs = pipeline.learner.inputs(next(pipeline.batches())[0])
    assert torch.equal(model.answer(inputs), pipeline.learner.predict(inputs))
    assert model.bytes == sum(each.nbytes for each in pipeline.learner.module.state_dict().values())
    assert model.bytes_in_memory == model.bytes


def test_a_program_that_answers_nothing_is_not_judged(found, monkeypatch):
    promise = stage("unused", Close(), nothing)
    monkeypatch.setattr(Wrapping, "network_calls", 3)
    assert judged(found, promise).rows[0].verdict == "INCONCLUSIVE"
    monkeypatch.setattr(Wrapping, "program_calls", 1)
    assert judged(found, promise).rows[0].verdict == "PASS"
