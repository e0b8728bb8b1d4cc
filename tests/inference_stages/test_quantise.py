"""Weights of eight bits take a quarter of the bytes, and answers stay close."""

import pytest
import torch
from learnt import attached, inputs, learnt, off

from runner.api import RunnerError, UsageError, nbytes
from runner.plugins.inference.export import ExportConfig
from runner.plugins.inference.quantise import QuantiseConfig

WIDE = ("model.width=128", "model.heads=4")


def quantised(name, *sets, **settings):
    pipeline = learnt(name, *sets)
    asked = inputs(pipeline, 1, 3, 4)
    before, expected = weights(pipeline), [pipeline.learner.predict(each) for each in asked]
    (stage,) = attached(pipeline, QuantiseConfig(**settings))
    errors = [off(pipeline.learner.predict(each), other) for each, other in zip(asked, expected, strict=True)]
    return pipeline, stage, (stage.bytes or weights(pipeline)) / before, max(errors)


def weights(pipeline):
    return nbytes(dict(pipeline.learner.module.state_dict()))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("shakespeare_gpt", {"backend": "torchao"}),
        ("shakespeare_gpt", {"backend": "torchao", "activations": False}),
        ("grasp_diffusion", {"backend": "torchao"}),
    ],
)
def test_bytes_fall_and_answers_stay_close(name, settings):
    pipeline, stage, ratio, error = quantised(name, *WIDE, **settings)
    assert ratio <= 0.35
    assert 0 < error < 0.05
    assert stage.closing_notes() == []
    assert "x)" in pipeline.reports["quantise"].notes[0]


def test_what_is_sensitive_or_named_stays():
    pipeline, *_ = quantised("grasp_diffusion", backend="torchao", keep=["*.own.q", "transformer.blocks.1"])
    rounded = {
        name
        for name, module in pipeline.learner.module.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor
    }
    block = "transformer.blocks.0"
    layers = ("own.kv", "own.out", "cloud.q", "cloud.kv", "cloud.out", "feed.0", "feed.2", "modulation")
    assert rounded == {f"{block}.{layer}" for layer in layers}


def test_torchao_leaves_convolutions_and_says_so():
    pipeline, *_ = quantised("mamba2_shakespeare", backend="torchao")
    assert "1 convolutions or embeddings stay" not in (note := pipeline.reports["quantise"].notes[0])
    assert "convolutions or embeddings stay in float32" in note


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("digits_classifier", {"backend": "torchao"}, "torchao rounds matrices alone"),
        ("shakespeare_gpt", {"backend": "torchao", "keep": ["*"]}, "torchao rounds matrices alone"),
        ("marl_baseline", {"backend": "torchao"}, "'masac' is not one network"),
    ],
)
def test_what_has_nothing_to_round_is_refused(name, settings, said):
    with pytest.raises(UsageError, match=said):
        attached(learnt(name, updates=0), QuantiseConfig(**settings))


def test_onnxruntime_wants_the_network_for_itself():
    with pytest.raises(UsageError, match=r"backend: .* switch export off"):
        attached(learnt("digits_classifier", updates=0), QuantiseConfig(), ExportConfig())


def test_what_is_rounded_is_not_trained():
    pipeline, *_ = quantised("shakespeare_gpt", backend="torchao")
    pipeline.learner.module.train()
    with pytest.raises(RunnerError, match="cannot be trained"):
        pipeline.learner.slots.forward(torch.zeros(1, 4, dtype=torch.int64))
    pipeline.learner.module.eval()
