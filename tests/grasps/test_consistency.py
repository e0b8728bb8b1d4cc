"""A student that answers in one or two evaluations."""

from dataclasses import replace

import pytest
import torch
from running import tiny

from runner.plugins.grasps.diffusion import multistep_consistency
from runner.plugins.grasps.stages.consistency import Consistency, ConsistencyConfig
from runner.plugins.grasps.stages.ddim import DdimConfig
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.pipeline import assemble

LEVELS = ("model.steps=8", "model.sampling_steps=8")


def trained(*sets, folder=None, **settings):
    """Returns a pipeline with gates that are open, a student of its model, and the inputs of a batch."""
    pipeline = assemble(replace(tiny("grasp_diffusion", *LEVELS, *sets), stages={}))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in pipeline.learner.module.named_parameters():
            if "modulation" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    pipeline.folder = folder
    inputs = pipeline.learner.inputs(next(pipeline.batches())[0])
    if settings:
        pipeline.attach_to_learnt({"consistency": ConsistencyConfig(levels=4, **settings)})
    return pipeline, inputs


@pytest.mark.parametrize("steps", [1, 2])
def test_an_answer_takes_as_many_evaluations_as_there_are_steps(steps):
    pipeline, inputs = trained(steps=steps, updates=2)
    calls = []
    pipeline.learner.module.register_forward_hook(lambda *_: calls.append(1))
    answer = pipeline.learner.predict(inputs)
    assert len(calls) == steps
    assert bool(answer.grasp.isfinite().all())
    pipeline.learner.predict({**inputs, "steps": 4})
    assert len(calls) == steps + 4
    (request,) = [pipeline.learner.config.request(**pipeline.learner.example_request())]
    assert pipeline.learner.requested([request])["noise"].shape[1] == 8


def test_fresh_noise_is_that_of_the_level():
    signal, sigma = torch.tensor([0.9, 0.8, 0.6, 0.1]), torch.tensor([0.1, 0.2, 0.4, 0.9])
    noise = torch.arange(8.0).view(4, 2)
    seen = []

    def denoise(x, level):
        seen.append((level, x))
        return x / 2

    answer = multistep_consistency(denoise, noise, signal, sigma, 2)
    assert [level for level, _ in seen] == [3, 1]
    torch.testing.assert_close(seen[1][1], 0.8 * noise[3] / 2 + 0.2 * noise[1])
    torch.testing.assert_close(answer, seen[1][1] / 2)


def inconsistency(pipeline, inputs):
    """Returns how different the predictions at two levels of a trajectory of the teacher are."""
    teacher, _ = trained()
    learner = teacher.learner
    with torch.no_grad():
        tokens = learner.slots.encode(inputs["cloud"])
        high, low = (torch.full((len(tokens),), level) for level in (7, 1))
        noisy = inputs["noise"][:, -1]
        x0 = learner.predict_x0(noisy, tokens, high)
        predicted = (noisy - learner.signal[7] * x0) / learner.sigma[7]
        cleaner = learner.signal[1] * x0 + learner.sigma[1] * predicted
        student = pipeline.learner
        first, second = student.predict_x0(noisy, tokens, high), student.predict_x0(cleaner, tokens, low)
    return float((first - second).square().mean())


def test_a_student_becomes_consistent_and_only_its_transformer_changes():
    teacher, inputs = trained()
    student, _ = trained(updates=200, lr=3e-3, steps=2)
    assert inconsistency(student, inputs) < 0.6 * inconsistency(teacher, inputs)
    pairs = zip(teacher.learner.module.named_parameters(), student.learner.module.parameters(), strict=True)
    changed = {name.split(".")[0] for (name, before), after in pairs if not torch.equal(before, after)}
    assert changed == {"transformer"}
    assert student.learner.averages is None


def test_a_student_is_trained_once_for_all_numbers_of_steps(tmp_path, monkeypatch):
    first, _ = trained("model.guidance=1", folder=tmp_path, updates=2, steps=2)
    monkeypatch.setattr(Consistency, "_train", lambda *_: pytest.fail("it was trained twice"))
    second, _ = trained("model.guidance=1", folder=tmp_path, updates=2, steps=1)
    pairs = zip(first.learner.module.parameters(), second.learner.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    # Its teacher's guidance is in its weights.
    assert second.learner.guidance == 0


@pytest.mark.parametrize("process", ["ddpm", "flow"])
def test_a_flow_has_a_student_too(process):
    pipeline, inputs = trained(f"model.process={process}", "model.sampler=ddim", updates=2, steps=1)
    assert bool(pipeline.learner.predict(inputs).grasp.isfinite().all())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="multiple of the 3 steps"):
        ConsistencyConfig(steps=3, levels=8)
    pipeline = assemble(replace(tiny("digits_classifier"), stages={}))
    with pytest.raises(UsageError, match="'classifier' takes no noise out"):
        pipeline.attach_to_learnt({"consistency": ConsistencyConfig()})
    pipeline, _ = trained()
    with pytest.raises(UsageError, match="levels: 20, but the model has 8 levels"):
        pipeline.attach_to_learnt({"consistency": ConsistencyConfig()})
    with pytest.raises(RecipeError, match="sample"):
        tiny("grasp_diffusion", *LEVELS, "inference.ddim={steps: 2}", "inference.consistency={levels: 4}")
    assert DdimConfig.claims == ConsistencyConfig.claims
