"""Stages of the radiance-field GAN: what is kept, what is replayed, and what is refused."""

import copy

import pytest
import torch
from running import tiny
from torch import nn

from runner.api import Close, Exact, Progress, UsageError
from runner.plugin.registry import Registry
from runner.plugins.radiance.camera import camera_from_angles, pixel_positions, rays
from runner.plugins.radiance.networks import PatchDiscriminator
from runner.plugins.radiance.ray_batch import RayBatch
from runner.plugins.radiance.replay import render_and_replay
from runner.plugins.radiance.stages.merged_discriminator import mixing
from runner.training.pipeline import assemble, resolve_device, setting_of
from runner.training.step import Step

REGISTRY = Registry()


def assembled(*sets):
    torch.manual_seed(0)
    return assemble(tiny("graf", *sets))


def updated(*sets, updates=2):
    """Returns logged values and gradients after some updates."""
    pipeline = assembled(*sets)
    step = Step(pipeline)
    outputs = [step() for _ in range(updates)]
    logged = [{name: float(mean.sum) for name, mean in output.items()} for output in outputs]
    return logged, pipeline.learner.gradients()


# --- ray_chunks ---------------------------------------------------------------------------------


def random_rays(learner, settings, samples):
    """Returns a batch of a random number of rays."""
    images, count = torch.randint(1, 5, (2,), generator=settings).tolist()
    count += int(torch.randint(0, 90, (), generator=settings))
    direction = torch.randn(images, count, 3, generator=settings)
    return RayBatch(
        origin=torch.randn(images, 1, 3, generator=settings),
        direction=direction / direction.norm(dim=-1, keepdim=True),
        latent=torch.randn(images, 2 * learner.config.latent, generator=settings),
        label=torch.randint(learner.classes, (images,), generator=settings),
        uniform=torch.rand(images, count, samples, generator=settings),
        density_noise=torch.randn(images, count, samples, generator=settings),
    )


@pytest.mark.parametrize("extra", [0, 3])
def test_replayed_chunks_give_the_same_bits_for_any_number_of_rays(extra):
    learner = assembled(f"model.importance_samples={extra}").learner
    parameters = learner.generator.parameters()
    settings = torch.Generator().manual_seed(0)
    for _ in range(50):
        ray_batch = random_rays(learner, settings, learner.config.samples + extra)
        chunks = ray_batch.chunks(int(torch.randint(1, 200, (), generator=settings)))
        direction = torch.randn(ray_batch.direction.shape, generator=settings)
        plain = torch.cat([learner.render_chunk(*chunk) for chunk in chunks], 1)
        replayed = render_and_replay(learner.render_chunk, chunks, parameters)
        assert torch.equal(replayed, plain)
        expected = torch.autograd.grad(plain, parameters, direction)
        gradients = torch.autograd.grad(replayed, parameters, direction)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_a_replayed_update_has_the_same_bits():
    expected, plain = updated("model.ray_chunk=40")
    logged, replayed = updated("model.ray_chunk=40", "optimization.ray_chunks.rays=40")
    assert logged == expected
    assert all(torch.equal(gradient, plain[name]) for name, gradient in replayed.items())


def test_chunks_of_another_size_promise_rounding_only():
    for rays_at_once, contract in ((64, Exact), (32, Close)):
        recipe = tiny("graf", "model.ray_chunk=64", f"optimization.ray_chunks.rays={rays_at_once}")
        setting = setting_of(recipe, resolve_device("cpu"))
        assert type(recipe.stages["ray_chunks"].contract(setting)) is contract


def bytes_saved(*sets):
    """Returns the most bytes that autograd holds for a backward pass of the generator."""
    pipeline = assembled("model.width=32", "model.samples=8", *sets)
    drawn = Step(pipeline).next()
    held = {}
    peak = [0]

    def pack(tensor):
        held[id(tensor)] = tensor.untyped_storage().nbytes()
        peak[0] = max(peak[0], sum(held.values()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = pipeline.learner.generator_loss(drawn.batch, drawn.noise["generator"], Progress("updates", 10))
    del loss
    return peak[0]


@pytest.mark.parametrize("kind", ["ray_chunks", "activation_checkpointing"])
def test_little_is_held_for_the_backward_pass(kind):
    chunks = ("model.ray_chunk=64", "optimization.ray_chunks.rays=64") if kind == "ray_chunks" else ()
    assert bytes_saved(*chunks, f"optimization.{kind}=on") < 0.3 * bytes_saved("model.ray_chunk=64")


# --- ray_cache ----------------------------------------------------------------------------------


def test_rays_are_found_by_camera_wherever_it_is_in_a_batch():
    pipeline = assembled("optimization.ray_cache=on")
    cameras = pipeline.source.held_out.tensors["camera"]
    order = torch.Generator().manual_seed(0)
    for _ in range(50):
        count = int(torch.randint(1, 9, (), generator=order))
        batch = cameras[torch.randint(len(cameras), (count,), generator=order)]
        expected = pipeline.learner.image_rays(batch)
        cached = pipeline.slots.image_rays(batch)
        assert all(torch.equal(*pair) for pair in zip(cached, expected, strict=True))
    assert pipeline.stages["ray_cache"].hits > 50


def test_poses_that_no_image_has_are_not_kept():
    pipeline = assembled("optimization.ray_cache=on")
    cameras = camera_from_angles(torch.rand(60, 2), 2.5)
    origin, direction = pipeline.slots.image_rays(cameras)
    assert torch.equal(direction, pipeline.learner.image_rays(cameras)[1])
    assert origin.shape == (60, 1, 3)
    assert not pipeline.stages["ray_cache"].directions


def test_rays_of_an_image_do_not_depend_on_others():
    cameras = camera_from_angles(torch.rand(50, 2), 2.5)
    positions = pixel_positions(16, 16)
    lens = torch.tensor([5.7, 5.7, 0.0, 0.0])
    together = rays(cameras, positions.expand(50, -1, -1), lens)[1]
    for camera, direction in zip(cameras, together, strict=True):
        assert torch.equal(rays(camera[None], positions[None], lens)[1][0], direction)


# --- merged_discriminator -----------------------------------------------------------------------


class MinibatchDeviation(nn.Module):
    """Adds the standard deviation over a batch, scaled by a gate that may begin closed."""

    def __init__(self, gate):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        return x + self.gate * x.std(0, keepdim=True)


WIDE = 8
HARMLESS = [
    nn.InstanceNorm2d(WIDE), nn.GroupNorm(2, WIDE), nn.Identity(), nn.Sigmoid(),
    nn.Conv2d(WIDE, WIDE, 1), nn.LocalResponseNorm(2), nn.Softmax(1),
]  # fmt: skip
MIXING = [
    nn.BatchNorm2d(WIDE), nn.BatchNorm2d(WIDE, track_running_stats=False), nn.SyncBatchNorm(WIDE),
    nn.Sequential(nn.Identity(), nn.BatchNorm2d(WIDE)),
    MinibatchDeviation(1.0), MinibatchDeviation(0.0), nn.Softmax(0),
    nn.InstanceNorm2d(WIDE, track_running_stats=True), nn.Dropout(0.5),
    nn.utils.parametrizations.spectral_norm(nn.Conv2d(WIDE, WIDE, 1)),
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", [*HARMLESS, *MIXING], ids=lambda layer: type(layer).__name__)
def test_layers_that_mix_samples_are_refused(layer, training):
    network = PatchDiscriminator(8, 2, 4)
    network.network[3] = layer
    network.train(training)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    patch = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    condition = torch.randn(8, 2, 8, 8, dtype=torch.float64)
    torch.set_rng_state(generator)
    reason = mixing(network, patch, condition)
    if training or type(layer) in (nn.BatchNorm2d, MinibatchDeviation):
        assert (reason is not None) is (layer in MIXING), reason
    assert torch.equal(torch.get_rng_state(), generator)
    assert network.training is training
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


def test_merged_logits_are_those_of_two_passes():
    _, plain = updated(updates=1)
    _, merged = updated("optimization.merged_discriminator=on", updates=1)
    for name, gradient in plain.items():
        torch.testing.assert_close(merged[name], gradient, atol=1e-5, rtol=1e-3)


# --- lazy_r1 ------------------------------------------------------------------------------------


def test_a_lazy_penalty_has_nothing_to_do_without_a_penalty():
    for sets in (("model.r1=0", "optimization.lazy_r1=on"), ("optimization.lazy_r1.every=1",)):
        (report,) = (r for r in assembled(*sets).reports.values() if r.kind == "lazy_r1")
        assert not report.active
        assert report.reason


def test_a_resumed_run_keeps_the_rhythm_of_the_penalty():
    sets = ("optimization.lazy_r1.every=3", "train.updates=12")
    pipeline = assembled(*sets)
    step = Step(pipeline)
    for _ in range(5):
        step()
    state = copy.deepcopy(pipeline.state_dict())
    expected = [float(step()["r1"].sum) for _ in range(4)]

    resumed = assembled(*sets)
    resumed.load_state_dict(state)
    step = Step(resumed)
    assert [float(step()["r1"].sum) for _ in range(4)] == expected
    assert [penalty > 0 for penalty in expected] == [False, True, False, False]


@pytest.mark.parametrize("kind", ["ray_cache", "merged_discriminator", "lazy_r1", "ray_chunks"])
def test_other_learners_are_refused(kind):
    with pytest.raises(UsageError, match="no slot"):
        tiny("digits_classifier", f"optimization.{kind}=on")
