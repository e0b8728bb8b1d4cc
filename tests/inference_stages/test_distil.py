"""A student comes closer to its teacher, once."""

import re

import pytest
import torch
from learnt import attached, inputs, learnt

from runner.api import UsageError
from runner.plugins.inference.distil import DistilConfig
from runner.plugins.inference.network import parameters


def student(name, updates):
    """The pipeline, and by how many per cent of their size the network's answers are off."""
    pipeline = learnt(name)
    attached(pipeline, DistilConfig(layers=1, updates=updates, lr=3e-3))
    (note,) = pipeline.reports["distil"].notes
    assert note.startswith("1 of 2 layers: ")
    return pipeline, float(re.search(r"off by ([\d.]+)%", note)[1])


@pytest.mark.parametrize("name", ["shakespeare_gpt", "grasp_diffusion"])
def test_it_learns_to_answer_like_the_teacher(name):
    (pipeline, first), (_, last) = student(name, 1), student(name, 60)
    assert last < 0.8 * first
    assert len(pipeline.learner.blocks()) == 1
    assert pipeline.learner.averages is None
    assert not pipeline.learner.module.training
    (asked,) = inputs(pipeline, 4)
    assert pipeline.learner.predict(asked).isfinite().all()


def test_it_begins_with_layers_of_the_teacher():
    pipeline = learnt("shakespeare_gpt", "model.layers=4")
    theirs = [block.qkv.weight.clone() for block in pipeline.learner.blocks()]
    before = parameters(pipeline.learner.module)
    attached(pipeline, DistilConfig(layers=3, updates=1, lr=1e-30))
    assert [
        next(place for place, other in enumerate(theirs) if torch.equal(block.qkv.weight, other))
        for block in pipeline.learner.blocks()
    ] == [0, 2, 3]
    assert parameters(pipeline.learner.module) == before - 12 * 16 * 16 - 4 * 16


def test_nobody_trains_a_student_twice(tmp_path, monkeypatch):
    weights = []
    for trainings in (1, 0):
        pipeline = learnt("shakespeare_gpt")
        pipeline.folder = tmp_path
        if not trainings:
            monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: pytest.fail("it was trained twice"))
            pipeline.learner.configure_optimizers = lambda: None
        attached(pipeline, DistilConfig(layers=1, updates=3))
        weights.append(list(pipeline.learner.module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("name", "layers", "said"),
    [
        ("digits_classifier", 1, "layers: learner 'classifier' has no setting of that name"),
        ("shakespeare_gpt", 2, "layers: 2 should be fewer than the 2"),
        ("marl_baseline", 1, "layers: learner 'masac' has no setting"),
    ],
)
def test_what_cannot_be_distilled_is_refused(name, layers, said):
    with pytest.raises(UsageError, match=said):
        attached(learnt(name, updates=0), DistilConfig(layers=layers))
