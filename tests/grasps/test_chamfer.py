import pytest
import torch
from running import tiny

from runner.plugin.progress import Progress
from runner.plugins.grasps.chamfer import chamfer
from runner.training.pipeline import assemble


def points(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)


def brute_force(left, right):
    """Returns the distance of one pair of sets, point by point."""
    there = [min((a - b).square().sum() for b in right) for a in left]
    back = [min((a - b).square().sum() for a in left) for b in right]
    return sum(there) / len(there) + sum(back) / len(back)


def test_distance_and_gradient_are_those_of_a_search_point_by_point():
    left, right = points(3, 5, 3), points(3, 7, 3)
    expected = torch.stack([brute_force(a, b) for a, b in zip(left, right, strict=True)])
    torch.testing.assert_close(chamfer(left, right), expected)
    weight = torch.tensor([1.0, 2.0, 3.0])
    for tensor in (left, right):
        (gradient,) = torch.autograd.grad((weight * chamfer(left, right)).sum(), tensor)
        torch.testing.assert_close(
            gradient, torch.autograd.grad((weight * expected).sum(), tensor, retain_graph=True)[0]
        )
    assert torch.autograd.gradcheck(chamfer, (left, right))
    assert chamfer(left, left.flip(1)).abs().max() == 0


@pytest.mark.parametrize("name", ["grasp_diffusion", "grasp_latent", "grasp_cvae"])
def test_the_chamfer_part_has_its_weight_with_and_without_merged_losses(name):
    def parts(*sets):
        pipeline = assemble(tiny(name, "optimization.fused_optimizer=off", "train.ema=null", *sets))
        grasp = pipeline.source.draw(4, Progress("updates", 1))["grasp"]
        answer = grasp + 0.1 * points(*grasp.shape).float()
        return pipeline.slots.restoration(answer, grasp)

    plain, one, merged = parts(), parts("model.chamfer=1"), parts("model.chamfer=2", "optimization.merged_losses=on")
    assert list(one) == [*plain, "chamfer"] == list(merged)
    assert one["chamfer"].shape == (4,)
    assert float(one["chamfer"].detach().min()) > 0
    torch.testing.assert_close(2 * one.pop("chamfer"), merged.pop("chamfer"))
    for part in plain:
        assert torch.equal(plain[part], one[part])


def test_the_outline_is_on_the_boxes():
    hand = assemble(tiny("grasp_diffusion")).source.hand
    grasp = torch.cat([torch.zeros(19), torch.tensor([1.0, 0, 0, 0, 1, 0])])
    outline = hand.outline_of(grasp.expand(2, 3, 25)).view(2, 3, -1, 2, 3)
    boxes = hand.boxes(grasp)
    torch.testing.assert_close(outline.mean(-2), boxes[:, :3, 3].expand(2, 3, -1, 3), atol=1e-6, rtol=0)
    length = (outline[..., 0, :] - outline[..., 1, :]).norm(dim=-1)
    torch.testing.assert_close(length, (2 * hand.box_half.amax(1)).expand_as(length))
