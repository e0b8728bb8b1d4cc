import math

import numpy as np
import pytest
import torch
from running import tiny

from runner.api import DatasetSource
from runner.plugin.progress import Progress
from runner.plugins.grasps.config import CubeGraspsConfig
from runner.plugins.grasps.cube import read
from runner.plugins.grasps.diffusion import alphas_cumprod
from runner.plugins.grasps.encoder import ENCODERS, FeaturePyramid, farthest_points, grouped, interpolated
from runner.plugins.grasps.geometry import JOINTS, LimitedGrasps, rotated, straightening, yaw
from runner.plugins.grasps.learner import weighted_loss
from runner.plugins.grasps.shapes import on_cubes
from runner.system.errors import UsageError
from runner.training.pipeline import assemble

LEARNERS = ("grasp_diffusion", "grasp_latent", "grasp_cvae")


def made(name="grasp_diffusion", *sets):
    return assemble(tiny(name, "optimization.fused_optimizer=off", "train.ema=null", "data.grasps=4", *sets))


def stirred(pipeline):
    """Its learner with gates that let something through, as all are zero at first, and rotations far from none."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in pipeline.learner.module.named_parameters():
            if "modulation" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        last_layer(pipeline.learner).bias[19:] += torch.tensor([2.0, 0, 0, 0, 2.0, 0])
    return pipeline.learner


def last_layer(learner):
    """Returns the layer whose outputs are the numbers of a grasp."""
    module = learner.module
    return module.grasp_decoder[-1] if hasattr(module, "grasp_decoder") else module.transformer.leave


def inputs_of(pipeline, rows=3):
    return pipeline.learner.inputs(pipeline.source.draw(rows, Progress("updates", 1)))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("name", LEARNERS)
def test_the_order_of_points_does_not_matter_and_that_of_grasps_is_kept(name, encoder):
    pipeline = made(name, f"model.encoder={encoder}")
    learner, inputs = stirred(pipeline), inputs_of(pipeline)
    answer = learner.predict(inputs)
    points = torch.randperm(inputs["cloud"].shape[1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        learner.predict({**inputs, "cloud": inputs["cloud"][:, points]}), answer, atol=1e-5, rtol=0
    )
    chance = next(key for key in inputs if key != "cloud")
    torch.testing.assert_close(
        learner.predict({**inputs, chance: inputs[chance].flip(-2)}),
        LimitedGrasps(*(part.flip(1) for part in answer)),
        atol=1e-5,
        rtol=0,
    )
    moved = learner.predict({**inputs, "cloud": 2 * inputs["cloud"]})
    assert float((moved.grasp - answer.grasp).abs().max()) > 1e-3  # the cloud is looked at


@pytest.mark.parametrize("name", LEARNERS)
def test_an_answer_does_not_depend_on_its_neighbours(name):
    pipeline = made(name)
    learner, inputs = stirred(pipeline), inputs_of(pipeline)
    alone = {key: tensor[1:2] for key, tensor in inputs.items()}
    expected = LimitedGrasps(*(part[1:2] for part in learner.predict(inputs)))
    torch.testing.assert_close(learner.predict(alone), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("model.sampler=ddim", "model.sampling_steps=2"),
        ("model.sampler=ddim", "model.eta=1"),
        ("model.process=flow", "model.sampler=ddim"),
        ("model.guidance=0.5",),
    ],
)
@pytest.mark.parametrize("name", ["grasp_diffusion", "grasp_latent"])
def test_sampled_grasps_have_proper_rotations_and_stay_finite(name, sets):
    pipeline = made(name, *sets)
    grasp, _ = stirred(pipeline).predict(inputs_of(pipeline))
    first, second = grasp[..., 19:22], grasp[..., 22:25]
    torch.testing.assert_close((first * second).sum(-1), torch.zeros(3, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(3, 4))


def test_levels_of_noise_mirror_each_other_and_one_in_ten_sees_no_cloud():
    pipeline = made("grasp_diffusion", "model.steps=100", "model.sampling_steps=100")
    batch = {"grasp": torch.zeros(2000, 1, 25)}
    noise = pipeline.learner.noise(batch, torch.Generator().manual_seed(0))
    assert torch.equal(noise["level"][:1000] + noise["level"][1000:], torch.full((1000,), 99))
    assert float(noise["blind"].float().mean()) == pytest.approx(0.1, abs=0.03)
    assert len(pipeline.learner.noise({"grasp": torch.zeros(5, 1, 25)}, torch.Generator())["level"]) == 5


def test_a_clean_grasp_with_the_right_answer_costs_nothing():
    pipeline = made()
    batch = pipeline.source.draw(4, Progress("updates", 1))
    parts = pipeline.learner.restoration(batch["grasp"], batch["grasp"])
    assert {float(part.abs().max()) for part in parts.values()} == {0.0}


@pytest.mark.parametrize("name", LEARNERS)
def test_one_squared_error_for_all_parts_is_each_of_them(name):
    plain, merged = made(name), made(name, "optimization.merged_losses=on")
    grasp = plain.source.draw(4, Progress("updates", 1))["grasp"]
    answer = torch.randn(grasp.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parts, gradients = [], []
    for pipeline in (plain, merged):
        parts.append(pipeline.slots.restoration(answer, grasp))
        gradients += torch.autograd.grad(torch.stack([*parts[-1].values()]).sum(), answer)
    torch.testing.assert_close(*parts)
    torch.testing.assert_close(*gradients)


def test_levels_with_little_signal_count_as_much_as_there_is_of_it():
    weight = made("grasp_diffusion", "model.steps=100", "model.min_snr=2.0").learner.weight
    assert float(weight[0]) == 1.0
    assert bool((weight[1:] <= weight[:-1]).all())
    kept = alphas_cumprod("cosine", 100)
    assert float(weight[50]) == pytest.approx(float(kept[50] / (1 - kept[50]) / 2), rel=1e-5)
    learner = made("grasp_diffusion", "model.min_snr=null").learner
    assert learner.weight.tolist() == [1.0] * 4
    parts = {"joints": torch.tensor([1.0, 3.0])}
    assert float(weighted_loss(parts, torch.tensor([1.0, 0.5])).sum) == 2.5
    assert float(weighted_loss(parts).also["joints"].sum) == 4.0


@pytest.mark.parametrize("name", LEARNERS)
def test_learned_weights_start_as_the_fixed_ones_and_add_up_over_parts_of_a_batch(name):
    fixed, learned = made(name), made(name, "model.task_weights=learned")
    batch = fixed.source.draw(4, Progress("updates", 1))
    noise = fixed.learner.noise(batch, torch.Generator().manual_seed(0))
    progress = Progress("updates", 100, updates=90)
    shared = dict(fixed.learner.module.named_parameters())
    for key, parameter in learned.learner.module.named_parameters():
        assert "log_variances" in key or torch.equal(parameter, shared[key])
    loss = learned.learner.loss(batch, noise, progress)
    torch.testing.assert_close(loss.sum, fixed.learner.loss(batch, noise, progress).sum)
    log_variances = learned.learner.module.log_variances
    with torch.no_grad():
        for part, value in (("translation", -0.5), ("rotation", 0.5), ("joints", 1.5)):
            log_variances[part].fill_(value)
    loss = learned.learner.loss(batch, noise, progress)
    halves = [
        learned.learner.loss(*({key: rows[half] for key, rows in tree.items()} for tree in (batch, noise)), progress)
        for half in (slice(2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(half.sum for half in halves), loss.sum)
    assert float(loss.also["log_variance_joints"].sum) == 4 * 1.5
    assert all(gradient.isfinite() for gradient in torch.autograd.grad(loss.sum, list(log_variances.values())))


def test_a_log_variance_has_no_gradient_where_it_is_that_of_the_errors():
    error = torch.tensor([1.0, 3.0])
    log_variance = torch.tensor(math.log(2.0), requires_grad=True)
    loss = weighted_loss({"joints": error}, log_variances={"joints": log_variance})
    assert float(loss.sum.detach()) == pytest.approx(2 + 2 * math.log(2))
    assert abs(float(torch.autograd.grad(loss.sum, log_variance)[0])) < 1e-6
    assert float(loss.also["joints"].sum) == 4


def test_the_weight_of_the_divergence_grows():
    pipeline = made("grasp_cvae")
    batch = pipeline.source.draw(4, Progress("updates", 1))
    noise = pipeline.learner.noise(batch, torch.Generator().manual_seed(0))
    half = round(50 * pipeline.learner.config.warmup)
    losses = [pipeline.learner.loss(batch, noise, Progress("updates", 100, updates=n)) for n in (0, half, 2 * half, 90)]
    nats = [float(loss.also["divergence"].sum) for loss in losses]
    assert nats[0] > 0
    assert nats == [nats[0]] * 4
    costs = [float((loss.sum - losses[0].sum).detach()) for loss in losses]
    weight = pipeline.learner.config.divergence
    assert costs == pytest.approx([0, weight * nats[0] / 2, weight * nats[0], weight * nats[0]], rel=1e-3)


def test_the_divergence_is_evaluated_in_nats_and_counts_with_the_weight_that_it_has_by_then():
    pipeline = made("grasp_cvae")
    settings, learner, source = pipeline.learner.config, pipeline.learner, pipeline.source

    def expected():
        total, rows = 0.0, 0
        with torch.no_grad(), learner.evaluating():
            for batch in source.held_out_batches():
                tokens = learner.slots.encode(batch["cloud"], batch.get("number"))
                chance = learner.noise(batch, torch.Generator().manual_seed(1))["chance"]  # the divergence needs none
                _, mean, log_variance = learner.slots.forward(chance, tokens, learner.straightened(batch))
                terms = mean.square() + log_variance.exp() - 1 - log_variance
                total += 0.5 * float(terms.sum(-1).mean(1).sum())
                rows += len(mean)
        return total / rows

    whole = expected()
    assert whole > 0
    parts = ("translation", "rotation", "joints", "keypoints")
    for updates in (0, 1, pipeline.progress.length):
        pipeline.progress.updates = updates
        weight = settings.divergence * min(1.0, pipeline.progress.fraction / settings.warmup)
        measured = DatasetSource.evaluate(source, learner)
        assert measured["divergence"] == pytest.approx(whole, rel=1e-4)
        restored = sum(measured[part] for part in parts)
        assert measured["loss"] - restored == pytest.approx(weight * whole, rel=1e-4, abs=1e-5)


def test_held_out_scenes_are_sampled_from_other_noise_in_every_batch():
    pipeline = made("grasp_diffusion")
    scenes = [{name: rows[part] for name, rows in pipeline.source.held_out.tensors.items()} for part in ([0], [1])]
    first, second = (pipeline.learner.inputs(scene)["noise"] for scene in scenes)
    assert not torch.equal(first, second)
    assert torch.equal(first, pipeline.learner.inputs(scenes[0])["noise"])


def test_farthest_points_are_far_from_each_other():
    cloud = torch.cat([torch.zeros(1, 20, 3), torch.ones(1, 1, 3), 3 * torch.ones(1, 1, 3)], 1)
    assert set(farthest_points(cloud, 3)[0].tolist()) >= {20, 21}
    centre, neighbour = grouped(cloud, 3, 4)
    assert centre.shape == (1, 3)
    assert neighbour.shape == (1, 3, 4)
    apart = cloud[0, centre[0], 0] > 0  # the others are all in one place
    assert torch.equal(neighbour[0, apart, 0], centre[0, apart])


def test_tokens_are_interpolated_between_the_nearest_centres():
    tokens = torch.tensor([[[1.0], [3.0], [8.0], [100.0]]])
    coarse = torch.tensor([[[0.0, 0, 0], [1.0, 0, 0], [0.0, 2, 0], [9.0, 0, 0]]])
    fine = torch.tensor([[[0.0, 0, 0], [0.5, 0, 0]]])
    weights = torch.tensor([4.0, 4.0, 1 / 4.25])
    expected = (weights * tokens[0, :3, 0]).sum() / weights.sum()
    torch.testing.assert_close(interpolated(tokens, coarse, fine)[0, :, 0], torch.stack([torch.tensor(1.0), expected]))
    assert float(interpolated(tokens[:, :1], coarse[:, :1], fine).min()) == 1


def test_a_coarse_level_of_a_pyramid_reaches_all_tokens():
    torch.manual_seed(0)
    cloud = on_cubes(torch.full((2,), 0.07), 64)
    encoder, groups = FeaturePyramid(8, 0.05), grouped(cloud, 32, 4)
    before = encoder(cloud, *groups)
    with torch.no_grad():
        encoder.lateral[-1].bias += 1
    assert bool(((encoder(cloud, *groups) - before).abs().amax(-1) > 1e-4).all())
    before.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_a_rotation_keeps_the_groups_of_a_cloud():
    cloud = on_cubes(torch.full((8,), 0.07), 64)
    turn = yaw(torch.rand(8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(farthest_points(cloud, 8), farthest_points(cloud @ turn.transpose(1, 2), 8))


def test_points_are_on_the_cube():
    edge = torch.tensor([0.06, 0.08])
    farthest = on_cubes(edge, 200).abs().amax(2)
    torch.testing.assert_close(farthest, (edge / 2)[:, None].expand(2, 200))


@pytest.mark.parametrize(
    "settings",
    [
        *(("data.frame=" + frame,) for frame in ("quarter", "yaw", "object", "random")),
        ("data.augment={degrees: 15.0}",),
        ("data.augment={degrees: 15.0}", "data.clouds=2"),
        ("data.augment={degrees: 180.0}", "data.frame=random"),
    ],
)
def test_cloud_and_grasps_are_turned_together(settings):
    """Turned back, clouds are on an upright cube and grasps are among those that are known."""
    source = made("grasp_diffusion", *settings).source
    batch = source.draw(4, Progress("updates", 1))
    back = batch["turn"].transpose(1, 2)
    cloud = batch["cloud"] @ back.transpose(1, 2)
    torch.testing.assert_close(cloud.abs().amax(2), (batch["edge"] / 2)[:, None].expand(4, 32), atol=1e-6, rtol=0)
    lower, upper = source.tables["lower"], source.tables["upper"]
    assert float(batch["grasp"].abs().max()) <= 1 + 1e-5
    grasp = rotated(lower + (batch["grasp"] + 1) / 2 * (upper - lower), back[:, None])
    known = read(source.config).grasp
    nearest = (grasp.flatten(0, 1)[:, None] - known).abs().amax(2).amin(1)
    assert float(nearest.max()) < 1e-5


def test_points_are_moved_as_far_as_is_said_and_held_out_ones_are_not():
    plain, moved = made().source, made("grasp_diffusion", "data.augment={jitter_mm: 2.0}").source
    batch = [moved.draw(4, Progress("updates", 1)) for _ in range(10)]
    cloud = torch.cat([each["cloud"] @ each["turn"] for each in batch])
    off = cloud.abs().amax(2) - torch.cat([each["edge"] for each in batch])[:, None] / 2
    assert 1e-3 < float(off.abs().mean()) < 3e-3
    assert torch.equal(plain.held_out.tensors["cloud"], moved.held_out.tensors["cloud"])


def test_clouds_that_are_kept_come_again_by_their_number():
    source = made("grasp_diffusion", "data.clouds=3").source
    seen = dict[int, torch.Tensor]()
    for batch in (source.draw(4, Progress("updates", 1)) for _ in range(20)):
        for number, cloud, edge in zip(batch["number"].tolist(), batch["cloud"], batch["edge"], strict=True):
            assert torch.equal(seen.setdefault(number, cloud), cloud)
            assert float((cloud[:, 2].abs().max() - edge / 2).abs()) < 5e-3
    assert seen.keys() == set(range(12))
    again = made("grasp_diffusion", "data.clouds=3").source.train.stored["cloud"]
    assert all(torch.equal(again[number], cloud) for number, cloud in seen.items())
    other = made("grasp_diffusion", "data.clouds=3", "seed=1").source.train.stored["cloud"]
    assert not torch.equal(again, other)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "every sample has a new cloud"),
        (("data.clouds=3", "data.augment={jitter_mm: 1.0}"), "jitter_mm"),
        (("data.clouds=3", "data.augment={degrees: 5.0}"), "degrees"),
    ],
)
def test_neighbourhoods_of_clouds_that_change_are_not_kept(sets, said):
    with pytest.raises(UsageError, match=said):
        made("grasp_diffusion", "optimization.grouping_cache=on", *sets)


def test_neighbourhoods_of_kept_clouds_are_not_looked_for_again():
    pipeline = made("grasp_diffusion", "data.clouds=3", "optimization.grouping_cache=on")
    batch = pipeline.source.draw(4, Progress("updates", 1))
    plain = grouped(batch["cloud"], 4, 4)
    pipeline.learner.config, kept = None, pipeline.learner.config  # without it nothing can be grouped
    for one, other in zip(pipeline.slots.group(batch["cloud"], batch["number"]), plain, strict=True):
        assert torch.equal(one, other)
    pipeline.learner.config = kept
    moved = batch["cloud"].flip(1)
    for one, other in zip(pipeline.slots.group(moved, batch["number"]), grouped(moved, 4, 4), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", LEARNERS)
def test_answers_turn_with_their_clouds(name):
    """Up to quarter turns, which are all that a cloud leaves open; without the setting they do not."""
    for straighten in (True, False):
        pipeline = made(name, f"model.straighten={str(straighten).lower()}")
        learner, inputs = stirred(pipeline), inputs_of(pipeline)
        answer, turn = learner.predict(inputs).grasp, yaw(torch.tensor(0.3))
        after = learner.predict({**inputs, "cloud": inputs["cloud"] @ turn.T}).grasp
        quarters = [rotated(answer, yaw(torch.tensor(0.3 + place * torch.pi / 2))) for place in range(4)]
        apart = torch.stack([(after - each).abs().amax((1, 2)) for each in quarters]).amin(0)
        assert (float(apart.max()) < 1e-4) == straighten


def test_a_straight_cube_is_found_in_a_cloud():
    cloud = on_cubes(torch.full((200,), 0.07), 256)
    turn = yaw(torch.rand(200, generator=torch.Generator().manual_seed(0)) * 6)
    straight = straightening(cloud @ turn.transpose(1, 2)) @ turn
    off = 4 * torch.atan2(straight[:, 1, 0], straight[:, 0, 0])
    assert float(torch.atan2(off.sin(), off.cos()).std() / 4) < 0.03


def test_the_unseen_size_is_never_drawn_and_held_out_scenes_stay():
    one, other = made().source, made().source
    drawn = torch.cat([one.draw(4, Progress("updates", 1))["edge"] for _ in range(30)])
    assert len(drawn.unique()) == 4
    assert float(one.unseen["edge"].unique()) == pytest.approx(0.07875)
    assert not torch.isin(one.unseen["edge"], drawn).any()
    for name, tensor in one.held_out.tensors.items():
        assert torch.equal(tensor, other.held_out.tensors[name])


class Known:
    """Answers with the grasps of the scenes, turned as they are, changed by a function."""

    def __init__(self, source, change=lambda grasp: grasp):
        self.source, self.change = source, change

    def inputs(self, batch):
        return batch

    def predict(self, batch):
        lower, upper = self.source.tables["lower"], self.source.tables["upper"]
        return self.source.hand.limited(self.change(lower + (batch["grasp"] + 1) / 2 * (upper - lower)))

    def evaluating(self):
        return torch.no_grad()


def test_what_grasps_are_worth_on_the_published_ones(published):
    """Real ones, as the simulator held them; and one grasp again and again, which is valid and has no diversity."""
    root = published("leap_cube_grasps.npz").parent
    real_data = ("data.synthetic=false", f"data.root={root}")
    source = made("grasp_diffusion", *real_data, "data.grasps=16", "data.scenes=40").source
    real = source.sampled(Known(source), 16, None)
    assert real["valid"] == pytest.approx(0.988, abs=0.02)
    assert real["strict"] == pytest.approx(0.948, abs=0.04)
    assert real["diversity_mm"] == pytest.approx(25.5, abs=2.5)
    assert real["coverage"] == 1
    assert real["matched_mm"] < 1e-3
    assert real["swapped_valid"] < 0.3
    same = source.sampled(Known(source, lambda grasp: grasp[:, :1].expand_as(grasp)), 16, None)
    assert same["diversity_mm"] < real["diversity_mm"]
    quarter = source.sampled(Known(source, lambda grasp: rotated(grasp, yaw(torch.tensor(torch.pi / 2)))), 16, None)
    assert quarter["diversity_mm"] == pytest.approx(real["diversity_mm"], abs=0.1)  # a cube looks the same
    assert quarter["strict"] == pytest.approx(real["strict"], abs=0.01)


@pytest.mark.parametrize("name", LEARNERS)
def test_joints_are_within_their_limits_and_those_that_were_beyond_are_counted(name):
    pipeline = made(name)
    learner, source, hand = stirred(pipeline), pipeline.source, pipeline.source.hand
    last_layer(learner).bias.data[JOINTS.start] += 50
    limited = learner.predict(inputs_of(pipeline))
    assert torch.equal(limited.grasp[..., JOINTS.start], hand.joint_upper[0].expand(3, 4))
    assert float(hand.excess(limited.grasp[..., JOINTS]).max()) == 0
    assert float(hand.excess(limited.predicted_joints).min()) > math.radians(1)
    metrics = source.sampled(learner, 2, 1)
    assert metrics["beyond_limits"] == metrics["unseen_beyond_limits"] == 1
    request = learner.config.request(**learner.example_request())
    (response,) = learner.answered([request], learner.predict(learner.requested([request])))
    assert [grasp.clamped for grasp in response.grasps] == [True]
    assert response.grasps[0].clamped_degrees > 1
    last_layer(learner).bias.data[JOINTS] = 0
    last_layer(learner).weight.data[JOINTS] = 0
    assert source.sampled(learner, 2, 1)["beyond_limits"] == 0


def test_a_grasp_beyond_the_limits_is_neither_strict_nor_valid():
    source = made().source
    lower, upper = source.tables["lower"], source.tables["upper"]
    grasp = lower + (source.held_out.tensors["grasp"][:1] + 1) / 2 * (upper - lower)
    edge = source.held_out.tensors["edge"][:1]
    assert bool(source._close(grasp, edge)["valid"].any())
    source.hand.joint_upper -= 10
    assert not source._close(grasp, edge)["valid"].any()


@pytest.mark.parametrize("content", [b"", b"no archive", "half"])
def test_a_file_that_holds_no_grasps_is_one_clear_line(content, tmp_path):
    path = tmp_path / "grasps.npz"
    if content == "half":
        np.savez(path, cube_edge=np.ones(3))
    else:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"data\.file: .*grasps\.npz"):
        read(CubeGraspsConfig(file=str(path), boxes=str(path)))
    with pytest.raises(UsageError, match="no such file"):
        read(CubeGraspsConfig(file=str(tmp_path / "other.npz")))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.heads=3", "divide"),
        ("model.sampling_steps=500", "at most"),
        ("model.process=flow", "take 'ddim'"),
        ("model={process: flow, sampler: ddim, eta: 0.5}", "straight line"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(setting, said):
    with pytest.raises(UsageError, match=said):
        tiny("grasp_diffusion", setting)


def test_clouds_are_encoded_once_for_a_sampling_and_again_for_the_next():
    plain, cached = made(), made("grasp_diffusion", "optimization.condition_cache=on")
    asked = []
    cached.slots.wrap("encode", lambda step: lambda cloud: asked.append(cloud) or step(cloud))
    inputs = inputs_of(plain)
    answer = stirred(plain).predict(inputs)
    assert torch.equal(stirred(cached).predict(inputs).predicted_joints, answer.predicted_joints)
    assert len(asked) == 1
    with torch.no_grad():
        for pipeline in (plain, cached):
            pipeline.learner.module.encoder.place.bias.add_(1.0)
    assert torch.equal(cached.learner.predict(inputs).grasp, plain.learner.predict(inputs).grasp)
    assert len(asked) == 2


def test_guidance_in_one_batch_is_guidance():
    sets = ("model.guidance=1.5", "model.sampler=ddim")
    plain, merged = made("grasp_diffusion", *sets), made("grasp_diffusion", *sets, "optimization.merged_guidance=on")
    inputs = inputs_of(plain)
    answer = stirred(plain).predict(inputs)
    torch.testing.assert_close(stirred(merged).predict(inputs), answer, atol=1e-5, rtol=0)
    without = stirred(made("grasp_diffusion", *sets[1:])).predict(inputs)
    assert float((answer.grasp - without.grasp).abs().max()) > 1e-3
