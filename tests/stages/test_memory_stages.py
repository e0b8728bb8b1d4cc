"""Accumulation, checkpointing and memory formats change what is in memory, not what is learnt; compilations count."""

import logging

import pytest
import torch
from test_every_stage_and_learner import REGISTRY, recipe_of
from torch import nn

from runner.api import Close, Statistical, restore
from runner.plugins.stages.activation_checkpointing import _checkpointed
from runner.proof.verdict import Outcome
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.timed_gate import quick
from runner.verify.variants import contract_of


def stepped(recipe, updates=3):
    pipeline = assemble(recipe, REGISTRY.files)
    step = Step(pipeline)
    return pipeline, [step() for _ in range(updates)]


@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_tokens_are_weighted_by_their_count_in_parts_of_any_size(micro_batch, tmp_path):
    """Of sequences of different lengths, whose total is known in the end only."""
    accumulated = f"optimization.gradient_accumulation.micro_batch={micro_batch}"
    recipe = recipe_of("tokens", tmp_path, "model.dropout=0.0", accumulated)
    assert isinstance(contract_of(recipe, "gradient_accumulation"), Close)
    # One part is smaller than the others.
    if micro_batch == 4:
        assert quick(recipe, REGISTRY, ["gradient_accumulation"]).outcome is Outcome.PASS
    plain = recipe_of("tokens", tmp_path, "model.dropout=0.0")
    (pipeline, found), (_, expected) = stepped(recipe), stepped(plain)
    for one, other in zip(found, expected, strict=True):
        assert float(one["loss"].count) == float(other["loss"].count)
        assert float(one["loss"].sum) == pytest.approx(float(other["loss"].sum), rel=1e-5)
    notes = pipeline.reports["gradient_accumulation"].notes
    assert bool(notes) is (micro_batch == 6)


def test_parts_that_draw_other_masks_promise_only_statistics(tmp_path):
    recipe = recipe_of("tokens", tmp_path, "optimization.gradient_accumulation=on")
    assert isinstance(contract_of(recipe, "gradient_accumulation"), Statistical)


def test_noise_and_what_else_is_logged_belong_to_their_part(tmp_path):
    recipe = recipe_of("images", tmp_path, "optimization.gradient_accumulation.micro_batch=4")
    (_, found), (_, expected) = stepped(recipe, 1), stepped(recipe_of("images", tmp_path), 1)
    assert found[0]["accuracy"] == expected[0]["accuracy"]
    assert float(found[0]["loss"].sum) == pytest.approx(float(expected[0]["loss"].sum), rel=1e-5)


@pytest.mark.parametrize("kinds", [("activation_checkpointing", "gradient_accumulation", "channels_last")])
def test_they_work_together(kinds, tmp_path):
    recipe = recipe_of("images", tmp_path, *(f"optimization.{kind}=on" for kind in kinds))
    assert quick(recipe, REGISTRY, list(recipe.stages)).outcome is Outcome.PASS


def test_a_block_computed_twice_draws_and_writes_once():
    """Dropout draws the same mask again; running statistics do not move a second time."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        if checkpointed:
            block.forward = _checkpointed(block)
        block(torch.randn(8, 4)).square().sum().backward()
        results.append([*(p.grad for p in block.parameters()), *block.buffers(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_restored_moments_lie_in_memory_as_their_parameter_does():
    """A fused kernel goes through both as they lie there."""
    weight = torch.randn(4, 3, 2, 2)
    plain = nn.Parameter(weight.clone())
    turned = nn.Parameter(weight.to(memory_format=torch.channels_last))
    optimizers = [torch.optim.Adam([parameter], fused=True) for parameter in (plain, turned)]
    for saved in (False, True):
        gradient = torch.randn(4, 3, 2, 2)
        if saved:
            restore(optimizers[1], optimizers[0].state_dict())
        for parameter, optimizer in zip((plain, turned), optimizers, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()
    assert torch.equal(plain, turned)


@pytest.mark.parametrize("settings", [{}, {"capturable": True}, {"fused": True}])
@pytest.mark.usefixtures("float64")
def test_restored_steps_have_the_type_in_which_the_optimizer_counts(settings):
    """torch's own way of loading makes them float32, which rounds the bias correction of float64."""
    saved, own = (torch.optim.Adam([nn.Parameter(torch.ones(3))], **each) for each in ({}, settings))
    for group in saved.param_groups:
        group["params"][0].grad = torch.ones(3)
    saved.step()
    restore(own, saved.state_dict())
    (entry,) = own.state.values()
    assert entry["step"] == 1
    assert entry["step"].dtype is (torch.float32 if "fused" in settings else torch.float64)


@pytest.mark.parametrize("vary", [True, False])
def test_what_is_compiled_again_is_counted_and_warned_about(vary, tmp_path, monkeypatch, caplog):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, mode, dynamic: compiled(step, backend="eager", dynamic=dynamic))
    recipe = recipe_of("tokens", tmp_path, "optimization.compile=on", "train.samples=600")
    monkeypatch.setattr(type(recipe.data), "shapes_vary", vary)
    with caplog.at_level(logging.WARNING):
        pipeline, _ = stepped(recipe, 8)
    (note,) = pipeline.stages["compile"].closing_notes() or ("0 recompilations",)
    again = int(note.split()[0])
    assert again <= 1 if vary else again >= 2
    assert ("do shapes vary" in caplog.text) is (again >= 2)
