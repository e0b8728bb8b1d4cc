"""What is left computes what the whole network does with those units at zero."""

import pytest
import torch
from learnt import SMALL, attached, inputs, learnt, off

from runner.api import UsageError
from runner.plugins.inference import prune
from runner.plugins.inference.network import parameters, settled
from runner.plugins.inference.prune import PruneConfig


def without(group, gone):
    """Zeroes what is read of some units, by their numbers."""
    for layer in group.read_by:
        by_unit = layer.weight.data.transpose(0, 1).unflatten(0, (group.units, -1))
        by_unit[gone] = 0


@pytest.mark.parametrize("name", SMALL)
def test_taking_out_is_masking(name):
    pipeline = learnt(name)
    learner, asked = settled(pipeline, "prune"), inputs(pipeline, 4)[0]
    groups = list(learner.prunable())
    before = parameters(learner.module)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(group.units, generator=generator) for group in groups]
    untouched = learner.predict(asked)
    for group, order in zip(groups, orders, strict=True):
        without(group, order[: group.units // 2])
    masked = learner.predict(asked)
    for group, order in zip(groups, orders, strict=True):
        prune._cut(group, order[group.units // 2 :].sort().values)
    assert off(learner.predict(asked), masked) < 1e-6 < off(untouched, masked)
    assert parameters(learner.module) < before


@pytest.mark.parametrize("importance", ["weights", "gradients"])
def test_what_matters_least_goes(importance):
    pipeline = learnt("shakespeare_gpt", "model.heads=4")
    (asked,) = inputs(pipeline, 4)
    groups = list(pipeline.learner.prunable())
    for group in groups:
        gone = torch.arange(1, group.units, 4)
        without(group, gone)
        if importance == "weights":
            for layer, times in group.made_by:
                layer.weight.data.unflatten(0, (times, group.units, -1))[:, gone] = 0
    before, size = pipeline.learner.predict(asked), parameters(pipeline.learner.module)
    attached(pipeline, PruneConfig(heads=0.25, ff=0.25, importance=importance))
    assert off(pipeline.learner.predict(asked), before) < 1e-6
    blocks = pipeline.learner.blocks()
    assert [(block.heads, block.qkv.out_features, block.up.out_features) for block in blocks] == [(3, 36, 48)] * 2
    left = size - 2 * (4 * 4 * 16 + 2 * 16 * 16)  # of every block a head of width 4, and 16 inner units
    assert parameters(pipeline.learner.module) == left
    (note,) = pipeline.reports["prune"].notes
    assert note.startswith("without 2 of 8 heads and 32 of 128 inner units: ")
    assert f"{left:,}" in note


def test_averages_are_what_is_pruned():
    pipeline = learnt("grasp_diffusion")
    assert pipeline.learner.averages is not None
    averages = {name: each.clone() for name, each in pipeline.learner.module.state_dict().items()}
    attached(pipeline, PruneConfig(heads=0, ff=0.5))
    assert pipeline.learner.averages is None
    kept = pipeline.learner.module.state_dict()
    same = [name for name in kept if kept[name].shape == averages[name].shape]
    assert len(same) < len(kept)
    assert all(torch.equal(kept[name], averages[name]) for name in same)


def test_a_training_that_goes_on_is_kept(tmp_path, monkeypatch):
    trained = PruneConfig(ff=0.5, updates=3, lr=1e-3)
    weights = []
    for config in (trained, trained, PruneConfig(ff=0.5)):
        pipeline = learnt("digits_classifier")
        pipeline.folder = tmp_path / "kept"
        if weights:
            monkeypatch.setattr(pipeline.learner, "update", lambda *_: pytest.fail("it was trained twice"))
        attached(pipeline, config)
        assert not pipeline.learner.module.training
        weights.append(torch.cat([parameter.flatten() for parameter in pipeline.learner.module.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_damaged_file_is_made_again(tmp_path):
    pipeline = learnt("digits_classifier")
    pipeline.folder = tmp_path
    attached(pipeline, PruneConfig(ff=0.5, updates=1))
    (kept,) = tmp_path.glob("*.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-40])
    pipeline = learnt("digits_classifier")
    pipeline.folder = tmp_path
    attached(pipeline, PruneConfig(ff=0.5, updates=1))
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("shakespeare_gpt", PruneConfig(heads=0.2, ff=0), "heads: 0.2 is less than one unit"),
        ("mamba2_shakespeare", PruneConfig(), "learner 'mamba2' has no removable units"),
        ("marl_baseline", PruneConfig(), "learner 'masac' is not one network"),
    ],
)
def test_what_cannot_be_pruned_is_refused(name, config, said):
    with pytest.raises(UsageError, match=said):
        attached(learnt(name, updates=0), config)
