"""Checkpointing by segments, and accumulation that grows with the epochs."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import segment_mutants
import tiny_learners
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_stage_and_learner import recipe_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.api import RunnerError, UsageError
from runner.plugin.registry import Registry
from runner.plugins.stages.block_segments import divide, postpone
from runner.plugins.stages.gradient_accumulation import GradientAccumulationConfig
from runner.proof.verdict import Outcome
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.timed_gate import quick

REGISTRY = Registry([Path(tiny_learners.__file__), Path(segment_mutants.__file__)])
TOWER = "model={kind: tiny_tower}"
CHECKPOINTED = "optimization.activation_checkpointing.segments="
DIVISORS = "optimization.gradient_accumulation.divisors="


def recipe(folder, *sets, learner="images"):
    return recipe_of(learner, folder, *sets, registry=REGISTRY)


def verdict(kind, folder, *sets, learner="images"):
    return quick(recipe(folder, *sets, learner=learner), REGISTRY, [kind])


def stepped(loaded, updates):
    pipeline = assemble(loaded, REGISTRY.files)
    step = Step(pipeline)
    for _ in range(updates):
        step()
    return pipeline


# --- segments ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.data())
def test_blocks_are_divided_evenly_and_in_their_order(count, data):
    segments = data.draw(st.integers(1, count))
    groups = divide(range(count), segments)
    assert [block for group in groups for block in group] == list(range(count))
    sizes = [len(group) for group in groups]
    assert len(sizes) == segments
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_segments_keep_all_bits(tmp_path):
    """Of blocks with dropout, running statistics and further inputs."""
    result = verdict("activation_checkpointing", tmp_path, TOWER, f"{CHECKPOINTED}3")
    assert result.outcome is Outcome.PASS, result.summary


@pytest.mark.parametrize(
    "kind",
    ["segments_skipped_block", "segments_other_masks", "segments_without_gradient", "segments_written_twice"],
)
def test_a_wrong_segment_is_rejected(kind, tmp_path):
    assert verdict(kind, tmp_path, TOWER, f"optimization.{kind}=on").outcome is Outcome.FAIL


@pytest.mark.parametrize("peeks", ["add", "function", "method", "item", "skip"])
def test_a_model_that_uses_a_result_within_a_segment_is_refused(peeks, tmp_path):
    """Anything else would be silently wrong."""
    sets = (f"model={{kind: tiny_tower, peeks: {peeks}}}", f"{CHECKPOINTED}2")
    with pytest.raises(RunnerError, match=r"activation_checkpointing\.segments: .*; set .*segments to null"):
        stepped(recipe(tmp_path, *sets), 1)


def test_more_segments_than_blocks_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"segments: 6 exceeds the number of blocks of 'TowerLearner' \(5\)"):
        assemble(recipe(tmp_path, TOWER, f"{CHECKPOINTED}6"), REGISTRY.files)


def test_a_single_segment_is_refused_with_its_line(tmp_path):
    with pytest.raises(UsageError, match=r"activation_checkpointing\.segments"):
        recipe(tmp_path, TOWER, f"{CHECKPOINTED}1")


def saved_bytes(loaded):
    """Bytes that autograd keeps for the backward pass of an update, each storage once."""
    pipeline = assemble(loaded, REGISTRY.files)
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    backward = pipeline.slots.backward
    measured = []

    def measuring(loss):
        measured.append(sum(sizes.values()))
        backward(loss)

    pipeline.slots.backward = measuring
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Step(pipeline)()
    return measured[0]


def test_fewer_segments_keep_less_until_the_backward_pass(tmp_path):
    sets = ("model={kind: tiny_tower, depth: 12}",)
    plain = saved_bytes(recipe(tmp_path, *sets))
    by_block = saved_bytes(recipe(tmp_path, *sets, "optimization.activation_checkpointing=on"))
    halves = saved_bytes(recipe(tmp_path, *sets, f"{CHECKPOINTED}2"))
    quarters = saved_bytes(recipe(tmp_path, *sets, f"{CHECKPOINTED}4"))
    assert by_block < plain
    # The last segment is not checkpointed, so that two segments keep half of all activations.
    assert quarters < halves < plain


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.data(), st.booleans())
def test_gradients_of_segments_have_the_same_bits(count, data, has_condition):
    segments = data.draw(st.integers(2, count))
    torch.manual_seed(count)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.3)) for _ in range(count)]
    results = []
    for grouped in (False, True):
        blocks = copy.deepcopy(layers)
        if grouped:
            for group in divide(blocks, segments)[:-1]:
                postpone(group, lambda forward: partial(checkpoint, forward, use_reentrant=False))
        torch.manual_seed(0)
        x = torch.randn(4, 3, requires_grad=True)
        y = x * 2 if has_condition else x
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        results.append([x.grad, *(parameter.grad for block in blocks for parameter in block.parameters())])
    assert all(map(torch.equal, *results))


# --- divisors ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 64),
    st.dictionaries(st.integers(0, 30), st.integers(1, 16), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 20),
)
def test_parts_follow_the_epoch(batch_size, numbers, epoch, micro_batch):
    schedule = [
        {"epoch": start, "divisor": divisor}
        for start, divisor in zip(sorted(numbers), sorted(numbers.values()), strict=True)
    ]
    config = GradientAccumulationConfig(micro_batch=micro_batch, divisors=schedule)
    size = config.part_size(batch_size, epoch)
    reached = [entry["divisor"] for entry in schedule if entry["epoch"] <= epoch]
    if reached:
        # No part is larger than that share of the batch, rounded up.
        assert -(-batch_size // size) <= reached[-1]
        assert size - 1 < batch_size / reached[-1] <= size
    else:
        assert size == micro_batch
    assert size <= config.largest_part(batch_size)
    assert config.part_size(batch_size, epoch + 1) <= max(size, config.largest_part(batch_size))


def test_growing_accumulation_keeps_the_gradient(tmp_path):
    """Of sequences with different lengths, so that parts have different weights."""
    sets = ("model.dropout=0.0", f"{DIVISORS}[{{epoch: 0, divisor: 2}}, {{epoch: 1, divisor: 4}}]")
    result = verdict("gradient_accumulation", tmp_path, *sets, learner="tokens")
    assert result.outcome is Outcome.PASS, result.summary


def test_the_number_of_parts_grows(tmp_path):
    loaded = recipe(tmp_path, f"{DIVISORS}[{{epoch: 1, divisor: 2}}, {{epoch: 2, divisor: 6}}]", "train.updates=18")
    pipeline = assemble(loaded, REGISTRY.files)
    parts = []
    loss = pipeline.slots.loss
    pipeline.slots.loss = lambda batch, *rest: parts.append(len(batch["label"])) or loss(batch, *rest)
    step = Step(pipeline)
    epochs = []
    for _ in range(18):
        parts.clear()
        epochs.append(pipeline.progress.epochs)
        step()
        expected = {0: [6], 1: [3, 3], 2: [1] * 6}[epochs[-1]]
        assert parts == expected
    assert sorted(set(epochs)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "learner"),
    [("parts_missing", "images"), ("parts_mean_of_means", "tokens"), ("parts_first_noise", "images")],
)
def test_wrong_parts_are_rejected(kind, learner, tmp_path):
    sets = ["model.dropout=0.0"] if learner == "tokens" else []
    stage = f"optimization.{kind}.divisors=[{{epoch: 0, divisor: 3}}]"
    assert verdict(kind, tmp_path, *sets, stage, learner=learner).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("[]", "names no epoch"),
        ("[{epoch: 5, divisor: 2}, {epoch: 5, divisor: 4}]", "epoch 5 follows epoch 5"),
        ("[{epoch: 5, divisor: 2}, {epoch: 3, divisor: 4}]", "epoch 3 follows epoch 5"),
        ("[{epoch: 0, divisor: 4}, {epoch: 3, divisor: 2}]", "divisor 2 of epoch 3 is below 4"),
        ("[{epoch: 0, divisor: 0}]", "divisor"),
        ("[{epoch: -1, divisor: 2}]", "epoch"),
        ("[{epoch: 0}]", "divisor"),
        ("{0: 2}", "divisors"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_line(schedule, words, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(
        f"name: wrong\n{tiny_learners.RECIPES['images']}"
        f"optimization:\n  gradient_accumulation:\n    divisors: {schedule}\n"
    )
    line = len(path.read_text().splitlines())
    from runner.recipe.loader import load

    with pytest.raises(UsageError, match=words) as error:
        load(path, (), REGISTRY)
    assert f"wrong.yaml:{line}:" in str(error.value)


def test_data_without_epochs_are_refused():
    config = GradientAccumulationConfig(divisors=[{"epoch": 0, "divisor": 2}])
    setting = SimpleNamespace(data=SimpleNamespace(kind="sim", units=frozenset({"updates"})))
    with pytest.raises(UsageError, match="'sim' has no epochs: use micro_batch"):
        config.inactive(setting)
    setting.data.units = frozenset({"updates", "epochs"})
    assert config.inactive(setting) is None
