"""Averaged parameters that stages for inference make permanent."""

import pytest
import torch
from toy_runs import TOYS, toy

from runner.plugins.inference.network import settled
from runner.training.pipeline import assemble


@pytest.mark.parametrize("ema", ["0.5", "null"])
def test_every_module_keeps_the_numbers_of_its_evaluation(ema, tmp_path, monkeypatch):
    pipeline = assemble(toy(tmp_path, f"train.ema={ema}", "train.updates=3"), [TOYS])
    learner = pipeline.learner
    extra = torch.nn.Linear(2, 2)
    monkeypatch.setattr(type(learner), "modules", lambda self: {"model": self.module, "extra": extra})
    learner.start_averages()
    with torch.no_grad():
        for module in learner.modules().values():
            for parameter in module.parameters():
                parameter.add_(1)
    with learner.evaluating():
        expected = [parameter.clone() for module in learner.modules().values() for parameter in module.parameters()]
    settled(pipeline, "export")
    assert learner.averages is None
    actual = [parameter for module in learner.modules().values() for parameter in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
