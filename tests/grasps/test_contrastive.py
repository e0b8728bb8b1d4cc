import math

import pytest
import torch
from running import tiny, train_here

from runner.plugin.progress import Progress
from runner.plugins.grasps.contrastive import similarities
from runner.system.errors import UsageError
from runner.training.pipeline import assemble

RECIPE = "cloud_contrastive"


def made(*sets):
    return assemble(tiny(RECIPE, "train.ema=null", *sets))


def drawn(pipeline):
    batch = pipeline.source.draw(4, Progress("updates", 1))
    return batch, pipeline.learner.noise(batch, torch.Generator().manual_seed(0))


def test_views_have_the_points_of_their_clouds_turned_about_z():
    learner = made("model.jitter_mm=0", "model.share=0.5").learner
    batch, noise = drawn(made())
    cloud = batch["cloud"]
    views = learner.views(cloud, noise).unflatten(0, (2, 4))
    assert views.shape == (2, 4, 16, 3)
    assert not torch.equal(views[0], views[1])

    def features(points):
        return torch.stack([points[..., :2].norm(dim=-1), points[..., 2]], -1)

    nearest = torch.cdist(features(views), features(cloud)).amin(-1)
    assert float(nearest.max()) < 1e-3  # every point of a view is one of the cloud
    still = made("model.jitter_mm=0", "model.degrees=0", "model.share=1").learner.views(cloud, noise)
    torch.testing.assert_close(still.sort(1).values, cloud.sort(1).values.repeat(2, 1, 1))
    assert made("model.share=0.01").learner.views(cloud, noise).shape[1] == 4  # what the neighbourhoods need


def test_equal_views_are_recognized_and_the_loss_is_that_of_info_nce():
    learner = made("model.jitter_mm=0", "model.degrees=0", "model.share=1").learner
    batch, noise = drawn(made())
    noise["order"][:, 1] = noise["order"][:, 0]
    loss = learner.loss(batch, noise, Progress("updates", 1))
    assert (float(loss.also["recognized"].sum), loss.count) == (4, 4)
    code = learner.predict(batch["cloud"])
    expected = -similarities(code, code, 0.1).log_softmax(1).diagonal().sum()
    torch.testing.assert_close(loss.sum.detach(), expected, atol=1e-4, rtol=1e-4)
    one = torch.eye(3)
    assert similarities(one, 2 * one, 0.5).tolist() == (2 * one).tolist()


def test_the_loss_of_a_cloud_depends_on_its_batch_and_batches_are_not_cut():
    pipeline = made()
    batch, noise = drawn(pipeline)
    halves = [
        pipeline.learner.loss(*({key: rows[half] for key, rows in tree.items()} for tree in (batch, noise)), None).sum
        for half in (slice(2), slice(2, 4))
    ]
    whole = pipeline.learner.loss(batch, noise, None).sum
    assert not math.isclose(float(sum(halves).detach()), float(whole.detach()), rel_tol=1e-3)
    with pytest.raises(UsageError, match="cannot be cut"):
        made("optimization.gradient_accumulation={micro_batch: 2}")


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("encoder", ["pointnet_lite", "pyramid"])
def test_grasps_start_with_the_encoder_of_the_clouds(encoder):
    result = train_here(RECIPE, f"model.encoder={encoder}")
    sets = (f"model.encoder={encoder}", f"model.init_from={result.run_name}")
    pipeline = assemble(tiny("grasp_diffusion", *sets))
    other = assemble(tiny("grasp_diffusion", sets[0]))
    expected = [name for name, _ in other.learner.module.encoder.state_dict(prefix="model.encoder.").items()]
    assert pipeline.start.taken == len(expected)
    assert not set(expected) & {*pipeline.start.missing, *pipeline.start.unused}
    assert all(name.startswith("model.projection.") for name in pipeline.start.unused)
    (remark,) = pipeline.start.remarks(None)
    assert "not found there: model.hand" in remark
    assert "left over: model.projection" in remark
    for (name, taken), built in zip(
        pipeline.learner.module.named_parameters(), other.learner.module.parameters(), strict=True
    ):
        assert torch.equal(taken, built) != name.startswith("encoder.")
    assert result.metrics["eval/recognized"] >= 0
