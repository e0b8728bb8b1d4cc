"""Parameters that are unfrozen during a training, and learning rates of their own."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import Adam
from toy_runs import RECIPE, TOYS, trained

from runner.api import RunnerError
from runner.plugin.optimizer import settings_of
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.checkpoint import kept
from runner.training.guards import GradientGuard
from runner.training.pipeline import assemble
from runner.training.step import Step

PLUGINS = [TOYS, TOYS.with_name("annealing.py")]


@pytest.fixture
def layered(tmp_path):
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("kind: toy}", "kind: toy_layered, dropout: 0.0}"))

    def pipeline(*sets, resumed=None):
        recipe = load(tmp_path / "toy.yaml", ["train.updates=20", *sets], Registry(PLUGINS))
        made = assemble(recipe, PLUGINS, resumed=resumed)
        if resumed is not None:
            made.load_state_dict(resumed)
        return made

    return pipeline


def stepped(pipeline, updates):
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


def rates(pipeline):
    return [group["lr"] for _, optimizer in pipeline.learner.optimizers() for group in optimizer.param_groups]


def states_differ(left, right):
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


SCHEDULES = {
    "linear": {"kind": "linear", "floor": 0.2},
    "cosine": {"kind": "cosine", "warmup": 0.2, "floor": 0.1},
    "step": {"kind": "step", "every": 0.3, "gamma": 0.5},
    "one_cycle": {"kind": "one_cycle", "peak": 0.4},
    "warm-up": {"kind": "constant", "warmup": 0.5},
    "constant": {"kind": "constant"},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_scales_the_rate_of_every_group_also_of_a_resumed_run(kind, layered):
    schedule = ", ".join(f"{key}: {value}" for key, value in SCHEDULES[kind].items())
    sets = ("model.rates=[0.5, 0.002]", f"lr_scheduler={{{schedule}}}")
    pipeline = stepped(layered(*sets), 7)
    factor = pipeline.recipe.lr_scheduler.multiplier(6 / 20)
    assert rates(pipeline) == pytest.approx([0.5 * factor, 0.002 * factor])

    state = kept(pipeline.state_dict())
    resumed = layered(*sets, resumed=state)
    for each in (pipeline, resumed):
        stepped(each, 12)
    factor = pipeline.recipe.lr_scheduler.multiplier(11 / 20)
    assert rates(resumed) == rates(pipeline) == pytest.approx([0.5 * factor, 0.002 * factor])
    assert not states_differ(pipeline.learner.module.state_dict(), resumed.learner.module.state_dict())


def test_a_group_that_is_added_during_the_training_is_scheduled_from_its_own_rate(layered):
    sets = ("model.thaw=5", "model.own=true", "model.adds=true", "lr_scheduler.kind=linear", "optimizer.lr=0.1")
    pipeline = stepped(layered(*sets), 11)
    assert rates(pipeline) == pytest.approx([0.1 * 0.5, 0.25 * 0.5])


@pytest.mark.parametrize("thaw", [3, 8])
@pytest.mark.parametrize(
    "sets",
    [
        ("optimizer={kind: sgd, lr: 0.1, momentum: 0.9, max_grad_norm: 0.5}",),
        ("optimizer={kind: adamw, lr: 0.01, weight_decay: 0.1}", "optimization.fused_optimizer=on"),
        ("optimizer={kind: adam, lr: 0.01}", "optimization.gradient_accumulation.micro_batch=3", "train.ema=0.5"),
    ],
)
def test_unfrozen_parameters_are_trained_from_then_on_also_of_a_resumed_run(sets, thaw, layered):
    sets = (f"model.thaw={thaw}", *sets)
    pipeline = layered(*sets)
    embedding = pipeline.learner.module[0].weight
    begun = embedding.detach().clone()
    stepped(pipeline, thaw)
    assert torch.equal(embedding, begun)
    stepped(pipeline, thaw + 3)
    assert not torch.equal(embedding, begun)

    state = kept(pipeline.state_dict())
    resumed = layered(*sets, resumed=state)
    assert resumed.learner.module[0].weight.requires_grad
    for each in (pipeline, resumed):
        stepped(each, 16)
    assert not states_differ(pipeline.learner.module.state_dict(), resumed.learner.module.state_dict())


def test_unfrozen_parameters_are_trained_as_in_plain_pytorch(layered):
    """Adam on all parameters, of which the embedding has no gradient before the fifth update."""
    pipeline = layered("model.thaw=5", "optimizer={kind: adam, lr: 0.02, max_grad_norm: 0.1}")
    learner, step = pipeline.learner, Step(pipeline)
    plain = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 16))
    plain.load_state_dict(learner.module.state_dict())
    plain[0].requires_grad_(False)
    optimizer = Adam(plain.parameters(), lr=0.02)
    for update in range(12):
        drawn = step.next()
        words = drawn.batch["words"]
        plain[0].requires_grad_(update >= 5)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        step(drawn)
    for name, value in plain.state_dict().items():
        assert torch.allclose(learner.module.state_dict()[name], value, atol=1e-6), name


def test_what_is_frozen_again_stays_as_it_is_and_is_not_clipped_with(layered):
    sets = ("model.freeze=6", "optimizer={kind: sgd, lr: 0.1, max_grad_norm: 0.01}")
    pipeline = layered(*sets)
    stepped(pipeline, 6)
    embedding = pipeline.learner.module[0].weight
    frozen = embedding.detach().clone()
    stepped(pipeline, 9)
    assert torch.equal(embedding, frozen)
    assert embedding.grad is None
    resumed = layered(*sets, resumed=kept(pipeline.state_dict()))
    assert not resumed.learner.module[0].weight.requires_grad


def test_unfrozen_parameters_that_no_optimizer_has_stop_the_training(layered, tmp_path):
    pipeline = layered("model.thaw=5", "model.own=true", "train.log_every=4")
    said = r"model\.0\.weight \(1 parameters\) were unfrozen .* no optimizer has them: add them in Layered\.configure"
    with pytest.raises(RunnerError, match=said):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 8


def test_a_gradient_that_no_optimizer_clears_does_not_count_in_the_norm(layered, caplog):
    """Of the embedding, which is trainable all the time, and which the optimizer of the learner has not."""
    pipeline = layered("model.own=true", "optimizer={kind: sgd, lr: 1.0, max_grad_norm: 0.5}")
    with caplog.at_level(logging.WARNING):
        GradientGuard(pipeline.learner)
    assert "no optimizer has model.0.weight (1 parameters): they stay as they are" in caplog.text
    head = pipeline.learner.module[-1]
    stepped(pipeline, 3)
    before = torch.cat([parameter.detach().flatten() for parameter in head.parameters()])
    pipeline.learner.module[0].weight.grad.fill_(1e6)
    stepped(pipeline, 4)
    moved = torch.cat([parameter.detach().flatten() for parameter in head.parameters()]) - before
    assert float(moved.norm()) == pytest.approx(0.5, rel=0.01)


def test_an_optimizer_that_refuses_what_is_frozen_has_what_is_trained(layered):
    """Muon takes matrices only, and norms and biases are frozen here."""
    pipeline = layered()
    for name, parameter in pipeline.learner.module.named_parameters():
        parameter.requires_grad_(name.endswith("weight") and parameter.dim() == 2)
    pipeline.learner.model.settings = settings_of("muon")(lr=0.01)
    pipeline.learner.configure_optimizers()
    stepped = [parameter for group in pipeline.learner.model.optimizer.param_groups for parameter in group["params"]]
    assert [tuple(parameter.shape) for parameter in stepped] == [(16, 8), (16, 8)]
