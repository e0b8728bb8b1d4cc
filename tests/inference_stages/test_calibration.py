"""Fixed ranges of inputs come from the data that are configured, and wrong ranges are rejected."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learnt import attached, inputs, learnt, off
from onnx import numpy_helper
from running import RECIPES, tiny
from trained_classifiers import classifier

from runner.api import Source, UsageError, map_tensors
from runner.plugin.registry import Registry
from runner.plugins.inference import calibration, quantise
from runner.plugins.inference.calibration import Calibration
from runner.plugins.inference.quantise import QuantiseConfig
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.training.trained_run import Trained
from runner.verify.inference_gate import verify_inference

HELD_OUT = Calibration(data="held_out", share=0.5)


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("mlp", ()),
        ("digits_classifier", ()),
        ("shakespeare_gpt", ("model.width=128", "model.heads=4")),
        ("mamba2_shakespeare", ("data.context=8",)),
    ],
)
def test_static_ranges_keep_answers_close(name, sets, tmp_path):
    pipeline = learnt(name, *sets)
    pipeline.folder = tmp_path
    questions = inputs(pipeline, 1, 3, 4)
    expected = [pipeline.learner.predict(question) for question in questions]
    attached(pipeline, QuantiseConfig(calibration=HELD_OUT))
    pairs = zip(questions, expected, strict=True)
    errors = [off(pipeline.learner.predict(question), answer) for question, answer in pairs]
    assert 0 < max(errors) < 0.08
    (path,) = tmp_path.glob("quantise-*.onnx")
    operations = {node.op_type for node in onnx.load(path).graph.node}
    assert "QuantizeLinear" in operations
    assert "DynamicQuantizeLinear" not in operations


def test_the_file_depends_on_the_calibration_and_is_made_once(tmp_path, monkeypatch):
    files = []
    for settings in (None, HELD_OUT, Calibration(data="held_out", share=1.0)):
        pipeline = learnt("mlp")
        pipeline.folder = tmp_path
        attached(pipeline, QuantiseConfig(calibration=settings))
        files.append(len(list(tmp_path.glob("quantise-*.onnx"))))
    assert files == [1, 2, 3]
    monkeypatch.setattr(quantise, "_round", lambda *_, **__: pytest.fail("it was rounded twice"))
    pipeline = learnt("mlp")
    pipeline.folder = tmp_path
    attached(pipeline, QuantiseConfig(calibration=HELD_OUT))


@pytest.fixture(scope="module")
def pipeline():
    return learnt("mlp", updates=0)


@pytest.mark.parametrize("data", ["train", "held_out"])
def test_a_limit_on_the_batches_is_reported(pipeline, data, monkeypatch):
    notes = []
    monkeypatch.setattr(pipeline, "note", notes.append)
    settings = Calibration(data=data, share=1, most=2)
    assert len(list(calibration.calibration_batches(pipeline, settings))) == 2
    assert re.fullmatch(r"calibrated with 2 of the \d+ batches that are 1 of the data \(calibration\.most\)", notes[0])
    list(calibration.calibration_batches(pipeline, Calibration(data=data, share=1)))
    assert len(notes) == 1


@given(share=st.floats(0.001, 1), data=st.sampled_from(["train", "held_out"]))
def test_a_share_is_that_of_the_batches_or_is_refused(pipeline, share, data):
    source = pipeline.source
    batches = {
        "train": source.epoch_samples(pipeline.batch_size) // pipeline.batch_size,
        "held_out": len(list(source.held_out_batches())),
    }
    settings = Calibration(data=data, share=share)
    if share * batches[data] < 1:
        with pytest.raises(
            UsageError, match=r"^quantise: calibration\.share: .* contains no batch: use at least"
        ) as refusal:
            calibration.calibration_batches(pipeline, settings)
        least = float(str(refusal.value).rpartition(" ")[2])
        assert len(list(calibration.calibration_batches(pipeline, Calibration(data=data, share=least)))) == 1
        return
    selected = list(calibration.calibration_batches(pipeline, settings))
    assert len(selected) == pytest.approx(share * batches[data], abs=1)
    assert len(selected) <= share * batches[data] + 1e-6
    if data == "held_out":
        expected = list(source.held_out_batches())[: len(selected)]
        assert all((a["image"] == b["image"]).all() for a, b in zip(selected, expected, strict=True))


@pytest.mark.parametrize(
    ("sets", "settings", "message"),
    [
        ((), {"backend": "torchao", "calibration": HELD_OUT}, "calibration: torchao computes ranges"),
        (
            ("data.limit={held_out: 0.05}",),
            {"calibration": HELD_OUT},
            r"calibration\.share: 0\.5 of 1 batches \(held_out\) contains no",
        ),
    ],
)
def test_calibrations_that_cannot_be_are_refused(sets, settings, message):
    with pytest.raises(UsageError, match=message):
        attached(learnt("mlp", *sets, updates=0), QuantiseConfig(**settings))


class Endless(Source):
    """Draws numbers without end, and holds out none."""

    def __init__(self):
        pass

    def draw(self, batch_size, progress):
        return torch.rand(batch_size, 3)

    def evaluate(self, learner):
        return {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train", "Endless does not report how long an epoch is"),
        ("held_out", "Endless has no held-out batches; use data: train"),
    ],
)
def test_a_source_without_such_batches_is_refused(data, message):
    simulated = SimpleNamespace(source=Endless(), batch_size=4)
    with pytest.raises(UsageError, match=rf"^quantise: calibration\.data: {message}"):
        calibration.calibration_batches(simulated, Calibration(data=data))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{share: 0.0}", "greater than 0"),
        ("{share: 1.5}", "less than or equal to 1"),
        ("{data: nothing}", "'train' or 'held_out'"),
    ],
)
def test_settings_out_of_range_are_errors_with_file_and_line(tmp_path, settings, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {RECIPES}/mlp.yaml\nname: mine\ninference:\n  quantise:\n    calibration: {settings}\n")
    with pytest.raises(RecipeError, match=message) as refusal:
        load(path, (), Registry())
    assert f"{path}:5:" in str(refusal.value)
    assert "inference.quantise.calibration" in str(refusal.value)


def language_model(folder):
    """A language model after a few updates."""
    registry = Registry()
    sets = ("model.width=32", "data.held_out=0.1", "train.tokens=64000", "train.batch_size=16")
    recipe = tiny("shakespeare_gpt", *sets, registry=registry)
    pipeline = assemble(replace(recipe, stages={}), registry.files)
    step = Step(pipeline)
    for _ in range(120):
        step()
    return Trained("here", recipe, registry, pipeline.state_dict(), folder)


@pytest.fixture(scope="module", params=[classifier, language_model])
def trained(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("run"))


def verdicts(trained, folder):
    stage = QuantiseConfig(calibration=HELD_OUT)
    recipe = replace(trained.recipe, inference={"quantise": stage})
    report = verify_inference(replace(trained, recipe=recipe, folder=folder), (), lambda _: None)
    return {row.verdict for row in report.rows}, report.rows[0].summary


def test_a_static_network_reaches_a_verdict(trained, tmp_path):
    outcomes, summary = verdicts(trained, tmp_path)
    assert outcomes == {"PASS"}, summary


BATCHES = calibration.calibration_batches
ROUND = quantise._round


def of_zeros(pipeline, settings):
    """Shows the ranges of inputs from the biases alone."""
    batch = next(BATCHES(pipeline, settings))
    return iter([map_tensors(lambda tensor: tensor * 0, batch)])


def scale_and_zero_point_swapped(scale, zero_point):
    return numpy.maximum(zero_point, 1).astype(scale.dtype), numpy.round(scale).astype(zero_point.dtype)


def scale_of_a_tenth(scale, zero_point):
    return scale / 10, zero_point


def scale_of_the_next_output(scale, zero_point):
    return numpy.roll(scale, 1), zero_point


def zero_point_forgotten(scale, zero_point):
    return scale, zero_point * 0


def changed_file(change, has_outputs):
    """Returns a function that rounds, and changes scales of inputs, or of weights with one scale for each output."""

    def rounds(source, rounded, **settings):
        ROUND(source, rounded, **settings)
        model = onnx.load(rounded)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for name, tensor in tensors.items():
            if not name.endswith("_scale"):
                continue
            point = tensors[f"{name.removesuffix('_scale')}_zero_point"]
            scales = numpy_helper.to_array(tensor)
            if (scales.ndim > 0) != has_outputs:
                continue
            scale, zero_point = change(scales, numpy_helper.to_array(point))
            tensor.CopyFrom(numpy_helper.from_array(numpy.asarray(scale), name))
            point.CopyFrom(numpy_helper.from_array(numpy.asarray(zero_point), point.name))
        onnx.save(model, rounded)

    return rounds


WRONG = {
    "swapped": (classifier, changed_file(scale_and_zero_point_swapped, has_outputs=False)),
    "a tenth": (classifier, changed_file(scale_of_a_tenth, has_outputs=False)),
    "of the next output": (language_model, changed_file(scale_of_the_next_output, has_outputs=True)),
    "no zero point": (language_model, changed_file(zero_point_forgotten, has_outputs=False)),
}
"""The last two change nothing in a classifier: its inputs are not negative, so their zero points are 0; and a norm
follows every rounded convolution.
"""


@pytest.mark.parametrize(("trained", "change"), WRONG.values(), ids=WRONG, indirect=["trained"])
def test_wrong_ranges_fail_the_gate(trained, change, tmp_path, monkeypatch):
    monkeypatch.setattr(quantise, "_round", change)
    outcomes, summary = verdicts(trained, tmp_path)
    assert outcomes == {"FAIL"}, summary


@pytest.mark.parametrize("trained", [classifier], indirect=True)
def test_ranges_of_zeros_fail_the_gate(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(quantise, "calibration_batches", of_zeros)
    outcomes, summary = verdicts(trained, tmp_path)
    assert outcomes == {"FAIL"}, summary
