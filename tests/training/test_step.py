"""One step of a training: its sequence, its random numbers, its learning rates."""

import pytest
import torch
from running import tiny
from toy_runs import toy_pipeline, trained

from runner.api import RunnerError
from runner.training.pipeline import assemble
from runner.training.step import Step

SCHEDULES = {
    "constant": {"kind": "constant", "warmup": 0.4},
    "linear": {"kind": "linear", "floor": 0.2},
    "cosine": {"kind": "cosine", "warmup": 0.2, "floor": 0.1},
    "step": {"kind": "step", "every": 0.3, "gamma": 0.5},
    "one_cycle": {"kind": "one_cycle", "peak": 0.4},
}


def parameters(pipeline):
    return {name: value.detach().clone() for name, value in pipeline.learner.named_parameters()}


def stepped(pipeline, updates):
    """The same pipeline, so many updates later."""
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_draws_moves_updates_feeds_back_and_counts_in_this_order():
    pipeline, said = assemble(tiny("marl_baseline", "data.warmup=16", "data.updates_per_step=0.25")), []

    def telling(name):
        return lambda step: lambda *arguments: said.append(name) or step(*arguments)

    for name in ("next_batch", "draw", "collect", "transfer", "update"):
        pipeline.slots.wrap(name, telling(name))
    for owner, name in ((pipeline.source, "feedback"), (pipeline.source, "counts"), (pipeline.learner, "noise")):
        setattr(owner, name, telling(name)(getattr(owner, name)))
    step = Step(pipeline)
    for _ in range(4):
        assert step() is None
        assert said == ["next_batch", "draw", "collect", "counts"]
        said.clear()
    assert step().keys() >= {"critic_loss", "td_error"}
    assert said == ["next_batch", "draw", "collect", "transfer", "noise", "update", "feedback", "counts"]
    assert step.batch["reward"].shape[0] == pipeline.batch_size


def test_a_source_that_has_nothing_yet_moves_on_without_an_update():
    pipeline = assemble(tiny("marl_baseline", "data.warmup=64"))
    step, before = Step(pipeline), parameters(pipeline)
    steps = []
    while step() is None:
        steps.append(pipeline.progress.env_steps)
    assert steps == list(range(4, 65, 4))
    assert pipeline.progress.updates == 1
    assert not same(before, parameters(pipeline))


def test_a_stage_that_draws_more_numbers_does_not_shift_what_later_updates_draw(tmp_path):
    plain = stepped(toy_pipeline(tmp_path, "train.updates=6"), 6)
    spending = stepped(toy_pipeline(tmp_path, "train.updates=6", "optimization.spendthrift=on"), 6)
    assert same(parameters(plain), parameters(spending))


def test_every_update_and_every_seed_draws_other_numbers(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=6")
    drawn = {}

    def drawing(step):
        def update(batch, noise, progress):
            drawn[pipeline.context.seed, progress.updates] = float(torch.rand(()))
            return step(batch, noise, progress)

        return update

    for seed in (5, 5, 6):
        pipeline = toy_pipeline(tmp_path, "train.updates=6", f"seed={seed}")
        pipeline.slots.wrap("update", drawing)
        stepped(pipeline, 6)
    assert len(set(drawn.values())) == len(drawn) == 12


def test_updates_draw_what_their_number_says_whatever_was_drawn_in_between(tmp_path):
    undisturbed, disturbed = (toy_pipeline(tmp_path, "train.updates=6") for _ in range(2))
    stepped(undisturbed, 6)
    step = Step(disturbed)
    for number in range(6):
        torch.manual_seed(number)
        disturbed.source.evaluate(disturbed.learner)
        step()
    assert same(parameters(undisturbed), parameters(disturbed))


@pytest.mark.parametrize("length", ["updates=10", "epochs=2", "samples=80", "tokens=480"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_learning_rates_follow_the_schedule_by_the_share_of_the_training(kind, length, tmp_path):
    schedule = ", ".join(f"{key}: {value}" for key, value in SCHEDULES[kind].items())
    sets = (f"train.{length}", f"lr_scheduler={{{schedule}}}", "optimizer.lr=0.5")
    pipeline, rates = toy_pipeline(tmp_path, *sets), []

    def looking(step):
        def update(*arguments):
            rates.append([group["lr"] for _, each in pipeline.learner.optimizers() for group in each.param_groups])
            return step(*arguments)

        return update

    pipeline.slots.wrap("update", looking)
    stepped(pipeline, 10)
    assert pipeline.progress.fraction == 1
    factors = [pipeline.recipe.lr_scheduler.multiplier(number / 10) for number in range(10)]
    assert rates == [[pytest.approx(0.5 * factor)] * 2 for factor in factors]  # decayed and spared parameters
    assert len(set(factors)) > 2


def test_a_learning_rate_that_a_graph_reads_is_changed_in_place(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=10", "lr_scheduler.kind=linear", "optimizer.lr=0.5")
    (_, optimizer), *_ = pipeline.learner.optimizers()
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    stepped(pipeline, 6)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.5 * 0.5)


def test_an_update_that_returns_nothing_is_said_at_once(tmp_path):
    pipeline = toy_pipeline(tmp_path, "model.kind=toy_silent", "train.updates=10")
    with pytest.raises(RunnerError, match=r"Silent\.update should return a dictionary of tensors, got NoneType"):
        trained(tmp_path, pipeline)
    assert pipeline.progress.updates == 0
