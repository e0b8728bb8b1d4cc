"""What is compiled for an evaluation is compiled once: not again for its last batch, or the last window of a text."""

import pytest
import torch
from running import tiny

from runner.train.assemble import assemble
from runner.train.step import Step

SMALL = {
    "digits_classifier": ("model.widths=[8]", "train.batch_size=32"),
    "shakespeare_gpt": ("model.layers=1", "model.width=16", "model.heads=2", "data.context=16", "train.batch_size=4"),
    "mamba2_shakespeare": ("data.context=16", "train.batch_size=4"),
}


@pytest.fixture
def compilations(monkeypatch):
    """The shapes of every graph that is compiled, by a backend that leaves the graph as it is."""
    torch._dynamo.reset()
    found = []

    def counting(graph, inputs):
        found.append([tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)][-1])
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, mode, dynamic: compiled(step, backend=counting, dynamic=dynamic))
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", SMALL)
def test_an_evaluation_compiles_for_its_first_batch_alone(kind, compilations):
    pipeline = assemble(tiny(kind, *SMALL[kind], "optimization={}", "optimization.compile=on", "device=cpu"))
    sizes = [next(iter(batch.values())).shape for batch in pipeline.source.held_out_batches()]
    assert len(set(sizes)) > 1  # the last one is smaller
    step = Step(pipeline)
    for _ in range(3):
        step()
    trained = len(compilations)
    assert trained > 0
    pipeline.source.rehearse(pipeline.learner, step.batch)
    rehearsed = len(compilations)
    first = pipeline.source.evaluate(pipeline.learner)
    assert len(compilations) == rehearsed, compilations
    again = pipeline.source.evaluate(pipeline.learner)
    step()
    assert len(compilations) == rehearsed, compilations
    assert first == again


@pytest.mark.parametrize("kind", SMALL)
def test_an_evaluation_of_a_compiled_model_measures_the_same(kind, compilations):
    plain, compiled = (
        assemble(tiny(kind, *SMALL[kind], "optimization={}", *sets, "device=cpu"))
        for sets in ((), ("optimization.compile=on",))
    )
    compiled.learner.load_state_dict(plain.learner.state_dict())
    expected = plain.source.evaluate(plain.learner)
    assert compiled.source.evaluate(compiled.learner) == pytest.approx(expected, rel=1e-5)
    assert compilations
