"""The radiance-field GAN's updates: penalties, gradients, and what follows from the progress."""

import re

import numpy as np
import pytest
import torch
from running import tiny, train_here
from torch import nn

from runner.api import RunnerError, UsageError
from runner.plugins.radiance.measures import psnr
from runner.plugins.radiance.networks import PatchDiscriminator, SuperResolution, encode, reduce
from runner.plugins.radiance.patches import patch_at
from runner.training.pipeline import assemble
from runner.training.step import Step


def learner_of(*sets):
    pipeline = assemble(tiny("graf", *sets))
    return pipeline, pipeline.learner


def batch_of(pipeline):
    return Step(pipeline).next()


def test_the_penalty_of_a_linear_discriminator_is_the_square_of_its_weights(monkeypatch):
    _, learner = learner_of()
    weight = torch.randn(3 * 8 * 8)

    class Linear(nn.Module):
        def forward(self, patch, planes):
            return patch.flatten(1) @ weight

    monkeypatch.setattr(learner.discriminator, "module", Linear())
    penalty = learner.gradient_penalty(torch.randn(4, 3, 8, 8), torch.zeros(4, 6, 8, 8))
    assert float(penalty) == pytest.approx(float(weight.square().sum()), rel=1e-6)


def test_the_penalty_equals_finite_differences_in_float64():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(8, 4, 4).double()
    patch = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    planes = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    patch.requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(patch, planes).sum(), patch, create_graph=True)
    step = 1e-6
    for place in [(0, 0, 0, 0), (1, 2, 3, 7), (0, 1, 4, 4)]:
        moved = torch.zeros_like(patch)
        moved[place] = step
        difference = (discriminator(patch + moved, planes) - discriminator(patch - moved, planes)).sum() / (2 * step)
        assert float(slope[place].detach()) == pytest.approx(float(difference.detach()), rel=1e-5, abs=1e-8)
    # The gradient of the penalty, which is what trains.
    penalty = slope.square().sum()
    parameter = next(discriminator.parameters())
    (found,) = torch.autograd.grad(penalty, parameter)

    def penalty_at(offset):
        with torch.no_grad():
            parameter[0, 0, 0, 0] += offset
        (slope,) = torch.autograd.grad(discriminator(patch, planes).sum(), patch)
        with torch.no_grad():
            parameter[0, 0, 0, 0] -= offset
        return float(slope.square().sum())

    difference = (penalty_at(step) - penalty_at(-step)) / (2 * step)
    assert float(found[0, 0, 0, 0]) == pytest.approx(difference, rel=1e-5, abs=1e-8)


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(
    "sets", [(), ("model.patch_scale=beta",), ("model.importance_samples=4",)], ids=["plain", "beta", "importance"]
)
def test_every_parameter_gets_a_gradient(sets):
    pipeline, learner = learner_of(*sets)
    step = Step(pipeline)
    reached = set()
    for _ in range(6):
        step()
        reached |= {name for name, gradient in learner.gradients().items() if gradient is not None and gradient.any()}
    missing = {name for name, _ in learner.named_parameters()} - reached
    # Densities may all be cut off at first in a network that is 8 wide; the views of other directions wait for them.
    assert not {name for name in missing if not name.startswith("generator.")}


@pytest.mark.usefixtures("migrated_workspace")
def test_super_resolution_without_a_gradient_is_stopped_by_name():
    with pytest.raises(RunnerError, match=r"super_resolution\.") as caught:
        train_here("graf", "model.gradient=cut", "train={updates: 60, batch_size: 4}")
    assert "generator." not in str(caught.value)


@pytest.mark.parametrize("side", [4, 18, 31])
def test_images_of_a_side_that_does_not_fit_are_refused(side, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, side, side, 3), dtype=np.uint8)
    pose = np.stack([np.arange(12) / 12, np.full(12, 0.4)], 1)
    np.savez(tmp_path / "views.npz", image=pixels, pose=pose)
    with pytest.raises(UsageError, match=rf"images are {side} pixels wide; make it 8 or more, and a multiple"):
        learner_of(f"data.file={tmp_path / 'views.npz'}")


def test_turns_have_noise_of_their_own_and_of_a_row_per_sample():
    noise = batch_of(assemble(tiny("graf"))).noise
    assert not torch.equal(noise["discriminator"]["latent"], noise["generator"]["latent"])
    assert all(len(table) == 4 for turn in noise.values() for table in turn.values())


def test_answers_follow_from_label_camera_and_latent_alone():
    pipeline, learner = learner_of("model.importance_samples=4")
    with learner.evaluating(), torch.no_grad():
        inputs = learner.inputs(batch_of(pipeline).batch)
        images = learner.predict(inputs)
        one = learner.predict({name: table[1:2] for name, table in inputs.items()})
    assert images.shape == (4, 3, 16, 16)
    torch.testing.assert_close(images[1:2], one, atol=1e-5, rtol=0)
    assert float(images.abs().max()) <= 1 + 1e-6


def test_encodings_are_as_exact_inside_of_autocast():
    points = torch.rand(50, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encode(points, 6)
    assert torch.equal(inside, encode(points, 6))
    assert inside.shape == (50, 3 * 13)


def test_an_enlarged_image_is_consistent_and_its_view_counts():
    torch.manual_seed(0)
    network = SuperResolution(8, 8, 4, 8)
    with torch.no_grad():
        network.views += torch.randn(8, 3, 8, 8)
    image = torch.rand(2, 3, 8, 8)
    first, second = network(image, torch.tensor([0.0, 0.1])), network(image, torch.tensor([0.2, 0.999]))
    assert first.shape == (2, 3, 32, 32)
    assert not torch.allclose(first[0], second[0])
    assert torch.equal(network(image, torch.tensor([0.05, 0.11])), first)
    assert (reduce(first, 4) - image).square().mean() < (reduce(first, 4)).square().mean()


def test_metrics_compare_super_resolution_with_bicubic_interpolation():
    pipeline, learner = learner_of()
    batch = batch_of(pipeline).batch
    with torch.no_grad():
        found = {name: float(mean.sum / mean.count) for name, mean in learner.metrics(batch).items()}
    assert found["sr_psnr"] - found["sr_gain"] > 10
    assert found["sr_residual"] > 0
    assert re.fullmatch(r"\d+\.\d+", f"{float(psnr(batch['image'], batch['image']).mean())}")


@pytest.mark.parametrize(
    "condition",
    [
        ("class",),
        ("pose",),
        ("position",),
        ("pose", "class"),
        ("class", "position"),
        ("position", "pose", "class"),
    ],
)
def test_the_discriminator_knows_what_the_condition_lists(condition):
    pipeline, learner = learner_of(f"model.condition=[{','.join(condition)}]")
    batch, noise = batch_of(pipeline).batch, torch.rand(4, 3)
    patch = patch_at(0.3 + 0.5 * noise[:, 0], noise[:, 1:])
    size = learner.config.patch
    planes = learner.condition_of(batch, patch)
    first = iter(planes.unbind(1))
    if "class" in condition:
        classes = torch.stack([next(first) for _ in range(learner.classes)], 1)
        assert torch.equal(classes.amax((2, 3)), classes.amin((2, 3)))
        assert torch.equal(classes[:, :, 0, 0].argmax(1), batch["label"])
        assert torch.equal(classes.sum(1), torch.ones(4, size, size))
    if "pose" in condition:
        cosine, sine, elevation = (next(first) for _ in range(3))
        azimuth = torch.atan2(sine, cosine) / (2 * torch.pi) % 1
        torch.testing.assert_close(azimuth[:, 3, 5], batch["pose"][:, 0] % 1)
        torch.testing.assert_close(elevation[:, 5, 3], batch["pose"][:, 1])
    if "position" in condition:
        column, row = next(first), next(first)
        # The mean position is the centre of the patch.
        torch.testing.assert_close(column.mean((1, 2)), patch.centre[:, 0])
        torch.testing.assert_close(row.mean((1, 2)), patch.centre[:, 1])
        width = (column[:, 0, -1] - column[:, 0, 0]) * size / (size - 1) / 2
        torch.testing.assert_close(width, patch.scale)
    assert next(first, None) is None
    assert learner.slots.judge(torch.zeros(4, 3, size, size), planes).shape == (4,)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1.0, 0.3), (-2.0, 0.0)])
def test_latent_vectors_have_the_configured_distribution(mean, deviation):
    pipeline, learner = learner_of(
        f"model.latent_mean={mean}", f"model.latent_deviation={deviation}", "model.latent=500"
    )
    batch = batch_of(pipeline).batch
    noise = learner.noise(batch, torch.Generator().manual_seed(0))
    for latent in (noise["generator"]["latent"], learner.inputs(batch)["latent"]):
        assert float(latent.mean()) == pytest.approx(mean, abs=0.1)
        assert float(latent.std()) == pytest.approx(deviation, abs=0.05)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_large_predictions_are_computed_in_parts(count, monkeypatch):
    pipeline, learner = learner_of()
    batch = batch_of(pipeline).batch
    rows = torch.arange(count) % 4
    inputs = {name: table[rows] for name, table in learner.inputs(batch).items()}
    sizes = []
    cast_rays = learner.slots.image_rays

    def counted(camera):
        sizes.append(len(camera))
        return cast_rays(camera)

    monkeypatch.setattr(learner.slots, "image_rays", counted)
    with learner.evaluating(), torch.no_grad():
        images = learner.predict(inputs)
        alone = [learner.predict({name: table[row : row + 1] for name, table in inputs.items()}) for row in rows]
    assert max(sizes) <= learner.config.prediction_batch
    assert sizes[: -len(alone)] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    torch.testing.assert_close(images, torch.cat(alone), atol=1e-5, rtol=0)
