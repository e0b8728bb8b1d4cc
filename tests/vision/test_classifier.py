import pytest
import torch

from runner.api import Progress
from runner.plugin.registry import Registry
from runner.plugins.vision.classifier import ResidualNet
from runner.plugins.vision.digits import read_digits
from runner.plugins.vision.image_classifier import shifted
from runner.recipe.loader import load
from runner.training.pipeline import assemble
from runner.training.step import Step

PROGRESS = Progress("updates", 1)


def pipeline(*sets):
    return assemble(load("digits_classifier", ["device=cpu", "model.widths=[8, 16]", *sets], Registry()))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 33, 20), (1, 4, 4), (3, 64, 64)])
@pytest.mark.parametrize("widths", [[8], [8, 16, 24]])
def test_any_image_becomes_logits(shape, widths):
    net = ResidualNet(shape, widths, 5)
    assert net(torch.rand(3, *shape)).shape == (3, 5)
    assert len(net.blocks) == 2 * len(widths)


def test_an_answer_does_not_depend_on_the_rest_of_the_batch():
    learner = pipeline().learner
    images = torch.rand(6, 1, 8, 8)
    torch.testing.assert_close(learner.predict(images)[2:3], learner.predict(images[2:3]))


def test_a_block_begins_as_its_shortcut():
    net = ResidualNet((1, 8, 8), [8], 2)
    image = torch.rand(2, 8, 8, 8)
    assert torch.equal(net.blocks[0](image), image)


def test_shifting_moves_images_and_fills_with_zeros():
    image = torch.rand(3, 2, 5, 6) + 1
    moved = shifted(image, torch.tensor([[1, 1], [0, 1], [1, 2]]), 1)
    assert torch.equal(moved[0], image[0])
    assert torch.equal(moved[1, :, 1:], image[1, :, :-1])
    assert not moved[1, :, 0].any()
    assert torch.equal(moved[2, :, :, :-1], image[2, :, :, 1:])
    assert not moved[2, :, :, -1].any()


def test_evaluation_leaves_images_where_they_are():
    made = pipeline("model.shift=2")
    batch = made.slots.next_batch(8, made.progress)
    noise = made.learner.noise(batch, torch.Generator().manual_seed(0))
    assert noise["shift"].shape == (8, 2)
    assert noise["shift"].min() >= 0
    assert noise["shift"].max() <= 4
    with made.learner.evaluating():
        evaluated = made.learner.metrics(batch)["loss"].sum.item()
        assert evaluated == made.learner.loss(batch, {}, PROGRESS).sum.item()
    assert made.learner.loss(batch, noise, PROGRESS).sum.item() != evaluated


def test_it_learns_64_images_by_heart():
    made = pipeline("model.shift=0", "optimizer.weight_decay=0", "lr_scheduler={kind: constant}")
    batch = made.slots.next_batch(64, made.progress)
    for _ in range(60):
        made.slots.update(batch, {}, made.progress)
    metrics = made.learner.metrics(batch)
    assert metrics["accuracy"].sum == metrics["accuracy"].count == 64
    assert metrics["loss"].sum / 64 < 0.1


def test_held_out_digits_are_not_trained_on_and_all_are_used():
    source = pipeline().source
    train, held_out = source.train.tensors, source.held_out.tensors
    assert (len(train["label"]), len(held_out["label"])) == (1437, 360)
    assert source.shapes == {"image": (1, 8, 8), "label": ()}
    assert 0 <= train["image"].min() < train["image"].max() <= 1
    from sklearn.datasets import load_digits

    both = torch.cat((held_out["image"], train["image"]))
    assert torch.equal(both[:, 0] * 16, torch.from_numpy(load_digits().images).float())


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    from runner.api import UsageError

    read_digits.cache_clear()
    monkeypatch.setattr("runner.plugins.vision.digits.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"'digits' needs the package .*proven-runner\[vision\]"):
        pipeline()


def test_a_training_goes_on_in_the_middle_of_an_epoch_bit_for_bit():
    through, begun, resumed = pipeline(), pipeline(), pipeline("seed=0")
    steps = Step(through)
    wanted = [steps() for _ in range(30)][-1]  # 22 updates are an epoch
    half = Step(begun)
    for _ in range(25):
        half()
    resumed.load_state_dict(begun.state_dict())
    rest = Step(resumed)
    assert resumed.progress.epochs == 1
    got = [rest() for _ in range(5)][-1]
    assert torch.equal(got["loss"].sum, wanted["loss"].sum)
    for one, other in zip(through.learner.module.parameters(), resumed.learner.module.parameters(), strict=True):
        assert torch.equal(one, other)
