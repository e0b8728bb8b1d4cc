"""The gate fails every stage of the radiance-field GAN that is wrong on purpose, and names where."""

import re
from pathlib import Path

import pytest
import radiance_mutants
import torch
from running import tiny, train_here

from runner.api import RunnerError, UsageError
from runner.plugin.registry import Registry
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.gate import verify_recipe
from runner.verify.options import Options

REGISTRY = Registry([Path(radiance_mutants.__file__)])
CHUNKS = "model.ray_chunk=64"
WRONG = [
    ("unchecked_merge", ("model.kind=mixing_gan",), "discriminator"),
    ("metric_deleted", (), "r1"),
    ("r1_in_bf16", (), "autocast casts to torch.bfloat16"),
    ("ray_cache_by_position", (), "predict|evaluat"),
    ("accumulation_with_shared_noise", (), r"slot '\w+'|_loss"),
    ("ray_chunk_dropped", (CHUNKS,), r"generator|slot"),
    ("replay_with_other_jitter", (), r"slot 'render"),
    ("labels_tiled", (), r"slot 'render"),
    ("weight_counted_in_calls", (), r"resume|sr_"),
]
"""Stages, with which settings, and what is named."""


def verdict(kind, *sets):
    recipe = tiny("graf", "optimization.heap_retention=off", *sets, f"optimization.{kind}=on", registry=REGISTRY)
    options = Options(2, budget=0.0, stages=(kind,), horizon=0, names_operators=False)
    (row,) = verify_recipe(recipe, REGISTRY, options, lambda _: None).rows
    return row


@pytest.mark.parametrize(("kind", "sets", "named"), WRONG)
def test_a_wrong_stage_fails_where_it_is_wrong(kind, sets, named):
    row = verdict(kind, *sets)
    assert row.verdict == "FAIL", row.summary
    assert re.search(named, row.summary), row.summary


@pytest.mark.usefixtures("migrated_workspace")
def test_a_deleted_tensor_that_is_logged_ends_the_training_with_its_name():
    kind = "deleted_before_it_is_logged"
    assert verdict(kind).verdict != "PASS"
    with pytest.raises(RunnerError, match="total_d_loss"):
        train_here("graf", f"optimization.{kind}=on", registry=REGISTRY)


def logged_penalties(*sets):
    """Returns ``r1`` of eight updates in which no parameter changes."""
    still = [f"optimizer.{role}.lr=1e-30" for role in ("discriminator", "generator")]
    torch.manual_seed(0)
    recipe = tiny("graf", "train.updates=9", *still, *sets, registry=REGISTRY)
    step = Step(assemble(recipe, REGISTRY.files))
    outputs = [step() for _ in range(8)]
    return [float(output["r1"].sum / output["r1"].count) for output in outputs]


def test_a_lazy_penalty_weighs_as_much_in_the_mean_and_not_without_its_factor():
    plain = logged_penalties()
    for every in (2, 3, 4, 8):
        lazy = logged_penalties(f"optimization.lazy_r1.every={every}")
        weights = [penalty / reference for penalty, reference in zip(lazy, plain, strict=True)]
        assert weights == pytest.approx([every * (number % every == 0) for number in range(8)])
    wrong = logged_penalties("optimization.lazy_r1_without_weight=on")
    weights = [penalty / reference for penalty, reference in zip(wrong, plain, strict=True)]
    assert sum(weights) == pytest.approx(2)


def test_a_discriminator_with_batch_norm_is_refused_by_its_layer():
    sets = ("model.kind=mixing_gan", "optimization.merged_discriminator=on")
    recipe = tiny("graf", *sets, registry=REGISTRY)
    layer = r"layer 'network\.3' \(BatchNorm2d\)"
    with pytest.raises(UsageError, match=f"merged_discriminator: .*{layer}"):
        assemble(recipe, REGISTRY.files)
