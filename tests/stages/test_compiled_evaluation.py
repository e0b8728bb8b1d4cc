"""An evaluation is compiled once: neither for its rehearsal, nor for a smaller last batch, nor for a shorter window."""

import random

import pytest
import torch
from running import tiny
from toy_runs import toy_pipeline

from runner.api import tensors
from runner.training.guards import FiniteGuard
from runner.training.pipeline import assemble
from runner.training.step import Step

SMALL = {
    "digits_classifier": ("model.widths=[8]", "train.batch_size=32"),
    "shakespeare_gpt": ("model.heads=2", "data.held_out=0.0006"),
    "mamba2_shakespeare": ("data.held_out=0.0006",),
}
DEFAULTS = ("optimization={}", "device=cpu")
COMPILED = ("optimization.compile=on", *DEFAULTS)


@pytest.fixture
def compilations(monkeypatch):
    """The shapes of the last input of every compiled graph, which is computed as it is."""
    shapes = []

    def counting(graph, inputs):
        shapes.append([tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)][-1])
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, mode, dynamic: compiled(step, backend=counting, dynamic=dynamic))
    torch._dynamo.reset()
    yield shapes
    torch._dynamo.reset()


def batch_shapes(source):
    """Returns the shape of the first tensor of every held-out batch."""
    return [next(tensors(batch)).shape for batch in source.held_out_batches()]


def train(pipeline, folder):
    """Makes a few updates with a training's guard, and returns their step."""
    FiniteGuard(pipeline.slots, pipeline.learner, folder, pipeline.is_compiled)
    step = Step(pipeline)
    for _ in range(3):
        step()
    return step


@pytest.mark.parametrize("name", SMALL)
def test_a_training_compiles_one_graph_for_updates_and_one_for_evaluations(name, compilations, tmp_path):
    pipeline = assemble(tiny(name, *SMALL[name], *COMPILED))
    assert len(set(batch_shapes(pipeline.source))) > 1
    step = train(pipeline, tmp_path)
    assert len(compilations) == 1

    rehearsed = pipeline.source.rehearse(pipeline.learner, step.batch)
    evaluations = [pipeline.source.evaluate(pipeline.learner) for _ in range(2)]
    step()
    assert len(compilations) == 2, compilations
    assert evaluations[0] == evaluations[1]
    assert rehearsed.keys() <= evaluations[0].keys()


@pytest.mark.parametrize("name", SMALL)
def test_a_compiled_evaluation_returns_the_metrics_of_an_eager_one(name, compilations):
    plain = assemble(tiny(name, *SMALL[name], *DEFAULTS))
    compiled = assemble(tiny(name, *SMALL[name], *COMPILED))
    compiled.learner.load_state_dict(plain.learner.state_dict())
    expected = plain.source.evaluate(plain.learner)
    assert compiled.source.evaluate(compiled.learner) == pytest.approx(expected, rel=1e-5)
    assert len(compilations) == 1


@pytest.mark.sampled(13)
@pytest.mark.parametrize("seed", range(50))
def test_evaluations_of_any_size_compile_once(seed, compilations, tmp_path):
    """Batches, held-out samples and the order of rehearsal and evaluations are random."""
    choice = random.Random(seed)
    batch, training = choice.randint(2, 9), choice.randint(2, 9)
    held_out = torch.arange(choice.randint(1, 40)) % 10
    settings = ("train.updates=5", f"train.batch_size={batch}", "model.dropout=0")
    pipeline = toy_pipeline(tmp_path, *settings, *COMPILED)
    plain = toy_pipeline(tmp_path, *settings, *DEFAULTS)
    for source in (pipeline.source, plain.source):
        source.select(held_out=held_out)
    # As batch_autotune does.
    pipeline.batch_size = training
    step = train(pipeline, tmp_path)
    plain.learner.load_state_dict(pipeline.learner.state_dict())
    expected = plain.source.evaluate(plain.learner)

    if choice.random() < 0.7:
        pipeline.source.rehearse(pipeline.learner, step.batch)
    evaluations = [pipeline.source.evaluate(pipeline.learner) for _ in range(3)]
    assert all(evaluation == evaluations[0] for evaluation in evaluations)
    assert evaluations[0] == pytest.approx(expected, rel=1e-5)
    assert len(compilations) <= 2, compilations


def test_a_guard_leaves_the_loss_of_a_language_model_in_one_graph(compilations, tmp_path):
    """Logits that a guard keeps would be an output of the graph, in float32."""
    pipeline = assemble(tiny("shakespeare_gpt", "model.heads=2", *COMPILED))
    guard = FiniteGuard(pipeline.slots, pipeline.learner, tmp_path, pipeline.is_compiled)
    step = Step(pipeline)
    step()
    assert guard.outputs.keys() == {"loss"}
    assert all(tensor.dim() == 0 for tensor in tensors(guard.outputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_forward_is_one_graph_whatever_its_type(dtype, compilations, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=5", *COMPILED)
    pipeline.learner.module.append(Cast(dtype))
    step = train(pipeline, tmp_path)
    assert len(compilations) == 1
    logits = pipeline.learner.slots.forward(step.batch["words"])
    assert logits.dtype == torch.float32


class Cast(torch.nn.Module):
    """Returns its input in another type, as autocast does."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)
