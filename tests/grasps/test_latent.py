"""A diffusion of latent vectors, with an autoencoder that its loss does not change."""

from dataclasses import replace

import pytest
import torch
from running import tiny

from runner.plugin.progress import Progress
from runner.plugins.grasps.diffusion import ddim
from runner.plugins.grasps.stages.consistency import ConsistencyConfig
from runner.plugins.grasps.stages.ddim import DdimConfig
from runner.training.pipeline import assemble
from runner.training.step import Step

LEVELS = ("model.steps=8", "model.sampling_steps=8")
AUTOENCODER = {"grasp_encoder", "grasp_decoder"}


def made(*sets, **inference):
    """Returns a pipeline whose gates are open, with stages for a trained model."""
    pipeline = assemble(replace(tiny("grasp_latent", *LEVELS, *sets), stages={}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in pipeline.learner.module.named_parameters():
            if "modulation" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    pipeline.attach_to_learnt(inference)
    return pipeline


def inputs_of(pipeline):
    return pipeline.learner.inputs(pipeline.source.draw(3, Progress("updates", 1)))


def parts_that_depend_on(learner, batch, *names):
    """Returns the parts of the network whose gradients change with these entries of the noise."""
    gradients = []
    first, second = (learner.noise(batch, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for noise in (first, {**first, **{name: second[name] for name in names}}):
        learner.module.zero_grad()
        learner.loss(batch, noise, Progress("updates", 1)).sum.backward()
        gradients.append({name: parameter.grad for name, parameter in learner.module.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    left, right = gradients
    return {name.partition(".")[0] for name in left if not torch.equal(left[name], right[name])}


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("model.process=flow", "model.sampler=ddim"),
        ("model.task_weights=learned", "model.chamfer=1"),
        ("model.latent_noise=0.5", "model.min_snr=null"),
    ],
)
def test_no_parameter_has_gradients_of_both_losses(sets):
    """With the same bits, whatever the noise of the other loss is."""
    pipeline = made("model.unconditional=0.5", *sets)
    batch = pipeline.source.draw(4, Progress("updates", 1))
    denoiser = {"encoder", "transformer", "no_cloud"}
    reconstruction = AUTOENCODER | ({"log_variances"} if "model.task_weights=learned" in sets else set())
    assert parts_that_depend_on(pipeline.learner, batch, "noise", "level", "blind") == denoiser
    assert parts_that_depend_on(pipeline.learner, batch, "decoder") == reconstruction


def test_latent_vectors_that_are_not_cut_off_are_found(monkeypatch):
    pipeline = made()
    batch = pipeline.source.draw(4, Progress("updates", 1))
    monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
    assert "grasp_encoder" in parts_that_depend_on(pipeline.learner, batch, "noise", "level", "blind")


@pytest.mark.parametrize("latent", [2, 6, 25])
def test_latent_vectors_have_unit_variance_and_their_length_means_nothing(latent):
    learner = made(f"model.latent={latent}").learner
    grasp = 3 * torch.randn(4, 5, 25, generator=torch.Generator().manual_seed(0))
    vectors = learner.module.latents(grasp)
    assert vectors.shape == (4, 5, latent)
    torch.testing.assert_close(vectors.square().mean(-1), torch.ones(4, 5))
    torch.testing.assert_close(learner.decoded(3 * vectors), learner.module.grasps(vectors))


def test_the_error_of_the_denoiser_is_that_of_latent_vectors_with_the_weight_of_the_level():
    learner = made().learner
    batch = made().source.draw(4, Progress("updates", 1))
    noise = learner.noise(batch, torch.Generator().manual_seed(0))
    clean = learner.clean(batch)
    assert not clean.requires_grad
    loss = learner.loss(batch, noise, Progress("updates", 1))
    level = noise["level"]
    signal, sigma = learner.signal[level, None, None], learner.sigma[level, None, None]
    tokens = torch.where(noise["blind"][:, None, None], learner.module.no_cloud, learner.encode(batch["cloud"]))
    x0 = learner.predict_x0(signal * clean + sigma * noise["noise"], tokens, level)
    errors = (x0 - clean).square().mean((1, 2))
    torch.testing.assert_close(loss.also["latent"].sum, (learner.weight[level] * errors).sum().detach())

    restored = learner.module.grasps(clean + learner.config.latent_noise * noise["decoder"])
    parts = learner.restoration(restored, learner.straightened(batch))
    for name, error in parts.items():
        torch.testing.assert_close(loss.also[name].sum, error.sum().detach())


def test_reconstructions_improve():
    pipeline = assemble(
        tiny("grasp_latent", "model.latent=20", "model.width=16", "train.updates=60", "optimizer.lr=5e-3")
    )
    learner, grasp = pipeline.learner, pipeline.learner.straightened(pipeline.source.held_out.tensors)

    def error():
        with torch.no_grad(), learner.evaluating():
            restored = learner.module.grasps(learner.module.latents(grasp))
            return float(sum(part.mean() for part in learner.restoration(restored, grasp).values()))

    before, step = error(), Step(pipeline)
    for _ in range(60):
        step()
    assert error() < 0.3 * before


@pytest.mark.parametrize("steps", [1, 3])
def test_fewer_steps_are_those_of_ddim_in_the_latent_space(steps):
    learner = made(ddim=DdimConfig(steps=steps)).learner
    inputs = inputs_of(made())

    def denoise(x, level):
        return learner.denoised(x, learner.encode(inputs["cloud"]), torch.full((len(x),), level))

    with torch.no_grad(), learner.evaluating():
        noise = inputs["noise"].transpose(0, 1)
        latent = ddim(denoise, noise, learner.signal, learner.sigma, steps)
        expected = learner.placed(learner.module.grasps(latent), inputs["cloud"])
    assert torch.equal(learner.predict(inputs).grasp, expected.grasp)


def test_a_consistent_student_keeps_the_autoencoder():
    teacher, student = made(), made(consistency=ConsistencyConfig(levels=4, updates=2, steps=2))
    inputs, calls = inputs_of(teacher), []
    student.learner.module.register_forward_hook(lambda *_: calls.append(1))
    assert bool(student.learner.predict(inputs).grasp.isfinite().all())
    assert len(calls) == 2
    pairs = zip(teacher.learner.module.named_parameters(), student.learner.module.parameters(), strict=True)
    changed = {name.partition(".")[0] for (name, before), after in pairs if not torch.equal(before, after)}
    assert changed == {"transformer"}


def test_grasps_are_not_rounded_by_mixed_precision():
    plain, mixed = (assemble(tiny("grasp_latent", *sets)) for sets in ((), ("optimization.amp={dtype: bf16}",)))
    batch = plain.source.draw(4, Progress("updates", 1))
    (vectors, restored), (others, mixed_restored) = (
        (pipeline.learner.clean(batch), pipeline.learner.decoded(pipeline.learner.clean(batch)))
        for pipeline in (plain, mixed)
    )
    assert torch.equal(vectors, others)
    assert torch.equal(restored, mixed_restored)
    noise = plain.learner.noise(batch, torch.Generator().manual_seed(0))
    left, right = (
        pipeline.learner.loss(batch, noise, Progress("updates", 1)).also["latent"].sum for pipeline in (plain, mixed)
    )
    assert not torch.equal(left, right)
