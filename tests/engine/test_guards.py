import pytest
import torch
from builders import build_masac, random_batch

from runner.engine.guards import FIRST_UPDATES, FiniteGuard, GradientGuard
from runner.errors import DivergedError, RunnerError
from runner.plugins.stages.merged_critic_loss import MergedCriticLoss
from runner.plugins.stages.stacked_agents import StackedAgents


def update(learner, batch):
    return learner.slots.update(batch, learner.noise(32, torch.Generator().manual_seed(0)))


def guarded_update(learner, guard, batch):
    losses = torch.stack([v for v in update(learner, batch).values() if v.dim() == 0])
    guard.check(7, losses, batch)


def test_a_nan_in_the_batch_is_named():
    learner = build_masac()
    guard = FiniteGuard(learner.slots, learner)
    batch = random_batch(0)
    guarded_update(learner, guard, batch)
    batch["reward"][3, 1] = float("nan")
    with pytest.raises(DivergedError, match=r"update 7: tensor 'reward' of the batch"):
        guarded_update(learner, guard, batch)


@pytest.mark.parametrize("stages", [[], ["merged"], ["merged", "stacked"]])
@pytest.mark.parametrize(
    ("slot", "named"),
    [
        ("target", "slot 'targets'"),
        ("critic_loss", "slot 'critic_step' returned a tensor 'loss'"),
        ("actor_loss", "slot 'actor_step' returned a tensor 'loss'"),
    ],
)
def test_the_first_slot_with_a_nan_is_named(slot, named, stages):
    kinds = {"merged": MergedCriticLoss, "stacked": StackedAgents}
    learner = build_masac([kinds[name](None) for name in stages])
    step = getattr(learner.slots, slot)

    def wrong(*args):
        output = step(*args)
        return output * float("inf") if slot == "target" else (output[0] * float("nan"), *output[1:])

    learner.slots.replace(slot, wrong)
    with pytest.raises(DivergedError, match=named):
        guarded_update(learner, FiniteGuard(learner.slots, learner), random_batch(0))


@pytest.mark.parametrize(
    ("slot", "named"), [("actor_forward", r"actors\.0\.head"), ("critic_forward", r"critics\.0\.q1")]
)
def test_a_detached_module_is_noticed(slot, named):
    learner = build_masac()
    forward = getattr(learner.slots, slot)
    learner.slots.replace(slot, lambda *args: forward(*args).detach())
    learner.slots.replace("backward", lambda loss: loss.backward() if loss.requires_grad else None)
    guard = GradientGuard(learner)
    for i in range(1, FIRST_UPDATES):
        update(learner, random_batch(i))
        guard.check(i)
    with pytest.raises(RunnerError, match=f"no gradient has reached {named}"):
        guard.check(FIRST_UPDATES)


def test_a_healthy_model_is_done_with_at_once():
    learner = build_masac()
    guard = GradientGuard(learner)
    update(learner, random_batch(0))
    guard.check(1)
    assert guard.done
