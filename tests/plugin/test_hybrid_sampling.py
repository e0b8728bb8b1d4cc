"""Batches of uniform, hard and rare samples, selected by the losses of earlier updates."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tiny

from runner.api import RunnerError
from runner.distributed.refusals import refuse_recipe
from runner.plugin.hybrid_sampling import HybridSampler, HybridSamplingConfig
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.checkpoint import kept
from runner.training.pipeline import assemble
from runner.training.step import Step

HYBRID = "data.sampling={kind: hybrid}"
LEARNERS = {
    "digits_classifier": (),
    "shakespeare_gpt": ("optimization.gradient_accumulation={micro_batch: 3}",),
    "gps_esol": ("optimization.bucketing=on",),
    "graphgpt_esol": (),
    "grasp_diffusion": (),
    "grasp_latent": (),
}
"""Recipes of every family with samples, some with a stage that cuts a batch."""


def made(samples=200, labels=None, **shares):
    return HybridSampler(HybridSamplingConfig(**shares), samples, labels, seed=3)


def learned(sampler, size, loss=lambda index: index.float()):
    """Draws a batch and returns its losses to the sampler."""
    index = sampler.draw(size)
    sampler.feedback(None, {"sample_losses": loss(index)})
    sampler.close()
    return index


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 4), st.booleans())
def test_a_batch_has_its_shares_and_no_sample_twice(size, more, warm, is_labelled):
    samples = size + more
    sampler = made(samples, torch.arange(samples) % 3 if is_labelled else None, uniform=0.25, hard=0.5, rare=0.25)
    for _ in range(warm):
        learned(sampler, size)
    known = sampler.losses.isfinite()
    before = sampler.position, sampler.epoch
    index = sampler.draw(size)
    assert len(index.unique()) == len(index) == size
    hard, rare = sampler.config.counts(size)
    assert hard == int(size / 2 + 0.5)
    assert rare == min(int(size / 4 + 0.5), size - hard)
    uniform = index[: size - hard - rare]
    available = known.clone()
    available[uniform] = False
    selected = index[len(uniform) :][: min(hard, int(available.sum()))]
    # The hardest of all others that were seen.
    assert sorted(selected.tolist()) == sorted(available.nonzero()[:, 0].tolist(), reverse=True)[: len(selected)][::-1]
    assert (sampler.position, sampler.epoch) != before or not len(uniform)


def test_uniform_samples_are_those_of_an_epoch():
    sampler = made(50, uniform=1, hard=0, rare=0)
    for _ in range(3):
        epoch = torch.cat([learned(sampler, 10) for _ in range(5)])
        assert sorted(epoch.tolist()) == list(range(50))

    # Hard samples of a batch are left out of the order only within that batch.
    sampler = made(1000, uniform=0.5, hard=0.5, rare=0)
    first = learned(sampler, 10)
    assert sampler.position == 10
    uniform = torch.cat([learned(sampler, 10)[:5] for _ in range(20)])
    assert len(torch.cat([first, uniform]).unique()) == 110


def test_rare_samples_are_of_small_classes_or_were_seen_least():
    labels = torch.cat([torch.zeros(900), torch.ones(90), torch.full((10,), 2), torch.full((50,), -1)]).long()
    sampler = made(len(labels), labels, uniform=0, hard=0, rare=1)
    classes = Counter(labels[torch.cat([learned(sampler, 2) for _ in range(400)])].tolist())
    assert -1 not in classes
    assert classes[2] > 3 * classes[1] > 6 * classes[0]

    unlabelled = made(60, uniform=0, hard=0, rare=1)
    for _ in range(7):
        learned(unlabelled, 20)
    assert unlabelled.visits.min() >= 2
    assert unlabelled.visits.max() <= 3


def test_a_sample_that_was_learned_is_hard_no_longer():
    sampler = made(30, uniform=0.5, hard=0.5, rare=0)
    for _ in range(6):
        learned(sampler, 10)
    hardest = int(sampler.losses.argmax())
    learned(sampler, 10, lambda index: torch.zeros(len(index)))
    assert sampler.losses[hardest] == 0


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_returns_the_losses_of_its_samples_and_resumes_bit_for_bit(name):
    recipe = tiny(name, HYBRID, *LEARNERS[name])
    pipeline = assemble(recipe)
    step = Step(pipeline)
    for _ in range(4):
        output = step()
    losses = output["sample_losses"]
    assert losses.shape == (pipeline.batch_size,)
    assert not losses.requires_grad
    mean = output["loss"].sum / output["loss"].count
    # Walks of different length count by their tokens.
    if name != "graphgpt_esol":
        assert float(losses.mean()) == pytest.approx(float(mean), rel=1e-4)
    hybrid = pipeline.source._hybrid
    index = (hybrid.visits > 0).nonzero()[:, 0]
    assert hybrid.losses[index].isfinite().all()
    assert int(hybrid.visits.sum()) == 4 * pipeline.batch_size

    state = kept(pipeline.state_dict())
    resumed = assemble(recipe, resumed=state)
    resumed.load_state_dict(state)
    other = Step(resumed)
    for _ in range(4):
        torch.testing.assert_close(step()["sample_losses"], other()["sample_losses"], rtol=0, atol=0)
    assert torch.equal(hybrid.losses, resumed.source._hybrid.losses)
    assert torch.equal(hybrid.visits, resumed.source._hybrid.visits)


@pytest.mark.parametrize("name", ["gps_esol", "shakespeare_gpt", "digits_classifier"])
def test_a_loss_belongs_to_its_sample_whatever_cuts_the_batch(name):
    plain, cut = (
        assemble(tiny(name, HYBRID, "optimization.bucketing=off", "optimization.gradient_accumulation=off", *sets))
        for sets in (
            (),
            LEARNERS[name] if name != "digits_classifier" else ("optimization.gradient_accumulation={micro_batch: 3}",),
        )
    )
    for _ in range(2):
        left, right = (Step(pipeline)() for pipeline in (plain, cut))
        torch.testing.assert_close(left["sample_losses"], right["sample_losses"], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_selects_the_same_samples_in_a_later_epoch():
    labels = torch.arange(40) % 4
    sampler = made(40, labels)
    for _ in range(9):
        learned(sampler, 10, lambda index: (index * 7 % 11).float())
    again = made(40, labels)
    again.load_state_dict(sampler.state_dict())
    for _ in range(9):
        assert torch.equal(learned(sampler, 10), learned(again, 10))


def test_other_sampling_returns_no_losses_and_has_no_feedback():
    pipeline = assemble(tiny("digits_classifier"))
    step = Step(pipeline)
    assert "sample_losses" not in step()
    assert not step._has_feedback
    assert pipeline.source.state_dict() == {"consumed": 1}


def test_selected_samples_have_their_own_labels():
    source = assemble(tiny("digits_classifier", HYBRID, "data.limit.train=0.5")).source
    assert torch.equal(source._hybrid.labels, source.labels())
    source.select(train=torch.arange(20))
    assert torch.equal(source._hybrid.labels, source.labels())
    assert len(source._hybrid.losses) == 20


def test_nothing_is_drawn_ahead_and_prefetch_is_without_effect():
    pipeline = assemble(tiny("gps_esol", HYBRID, "optimization.prefetch=on", "optimization.preprocess_once=off"))
    assert pipeline.source.ahead() == 0
    assert not pipeline.reports["prefetch"].active
    assert "nothing can be loaded ahead" in pipeline.reports["prefetch"].reason


@pytest.mark.parametrize("shares", ["uniform: 0.25, hard: 0.25, rare: 0.5", "uniform: 1, hard: 0, rare: 0"])
def test_every_share_may_be_set(shares):
    """That of uniform samples follows from the others, so that no code but a validator reads it."""
    pipeline = assemble(tiny("digits_classifier", f"data.sampling={{kind: hybrid, {shares}}}"))
    Step(pipeline)()
    pipeline.refuse_unread()


def test_several_processes_are_refused():
    with pytest.raises(UsageError, match="batches of 'digits' depend on the outputs of updates"):
        refuse_recipe(tiny("digits_classifier", HYBRID), 2)


@pytest.mark.parametrize(
    ("name", "sets", "message"),
    [
        ("digits_classifier", ("data.sampling={kind: hybrid, hard: 0.9}",), "add up to 1, and 0.5 + 0.9 + 0.2 is 1.6"),
        ("digits_classifier", ("data.sampling={kind: hybrid, hrad: 0.9}",), "data.sampling.hrad"),
        ("digits_classifier", ("data.sampling=even",), "data.sampling: should be 'random' or 'balanced'"),
        ("digits_classifier", (HYBRID, "train.overfit_batches=2"), "train.overfit_batches: repeats the same batches"),
        ("gps_esol", (HYBRID, "data.workers=2"), "data.workers: 2 would load ahead"),
        ("gcn_cora", (HYBRID,), "hybrid sampling needs the loss of every sample, which 'gcn' does not return"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_place(name, sets, message):
    with pytest.raises(RecipeError) as refused:
        assemble(tiny(name, *sets))
    assert message in str(refused.value)


@pytest.mark.parametrize("losses", [{}, {"sample_losses": torch.zeros(3)}])
def test_a_learner_without_losses_of_samples_is_one_line(losses):
    sampler = made()
    sampler.draw(4)
    with pytest.raises(RunnerError, match=r"should return Loss\(\.\.\., samples=\.\.\.\) of shape \[4\], got [^\n]*$"):
        sampler.feedback(None, losses)
