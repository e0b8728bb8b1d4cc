"""Trainings with other held-out data, with other samples, and after an evaluation that was interrupted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judging import HERE, LONG, judge, pair_of, recipe_of
from running import TRAINED, tiny

from runner.api import DatasetConfig, DatasetSource
from runner.plugin.context import Context, Slots
from runner.plugin.registry import Registry
from runner.proof.isolation import Isolation
from runner.proof.verdict import Outcome
from runner.verify.checks.evaluations import EvaluationsCheck
from runner.verify.checks.held_out_data import HeldOutDataCheck
from runner.verify.checks.other_data import OtherDataCheck
from runner.verify.checks.sampled_batches import SampledBatchesCheck
from runner.verify.evaluation_checks import Query, answers
from runner.verify.other_data import HeldOutPart, UnchangeableDataError, differing_metrics, held_out_worlds, renumber

pytestmark = pytest.mark.usefixtures("short_texts")
REGISTRY = Registry([HERE / "wrong_data.py"])
HELD_OUT = {
    "learns_from_evaluation": "the training depends on held-out data: update 4: 'batch.image'",
    "rate_of_held_out": "the training depends on held-out data: the state at the end",
    "cleaned_labels": "held-out data are modified: 'label'",
}
CACHES = {
    "batches_of_the_process": "the sample is not the same",
    "held_out_in_a_file": "an evaluation has the metric 'nats_per_character'",
    "first_weights_again": "the result of an update is not the same",
}


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        ("learns_from_evaluation", "exact"),
        ("learns_from_evaluation", "statistical"),
        ("rate_of_held_out", "close"),
        ("cleaned_labels", "close"),
        ("cleaned_labels", "statistical"),
    ],
)
def test_a_training_that_uses_held_out_data_fails(kind, promise):
    verdict = judge(HeldOutDataCheck(), kind, REGISTRY, promise)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert HELD_OUT[kind] in verdict.summary


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_belongs_to_other_data_fails(kind):
    # The cache is filled by a training with the recipe's data.
    recipe = recipe_of(kind, REGISTRY)
    for check in (SampledBatchesCheck(), EvaluationsCheck()):
        assert check.run(*pair_of(recipe, kind, REGISTRY)), check.name
    verdict = OtherDataCheck().run(*pair_of(recipe, kind, REGISTRY))
    assert verdict.outcome is Outcome.FAIL, verdict
    assert f"in a second training, with other data: {CACHES[kind]}" in verdict.summary


@pytest.mark.parametrize("kind", ["flag_of_evaluation", "leftover_batches", "frozen_by_evaluation"])
def test_what_an_interrupted_evaluation_leaves_behind_fails(kind):
    verdict = judge(EvaluationsCheck(), kind, REGISTRY)
    assert verdict.outcome is Outcome.FAIL, verdict


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("digits_classifier", "fused_optimizer"),
        ("shakespeare_gpt", "activation_checkpointing"),
        ("marl_baseline", "forward_cache"),
        ("gps_esol", "preprocess_once"),
    ],
)
def test_correct_stages_pass(name, kind):
    registry = Registry()
    pair, budget = pair_of(tiny(name, f"optimization.{kind}=on"), kind, registry)
    for check in (HeldOutDataCheck(), OtherDataCheck()):
        verdict = check.run(pair, budget)
        assert verdict, (check.name, verdict.summary)


def test_an_evaluation_of_a_text_is_compared():
    pair, budget = pair_of(tiny("shakespeare_gpt"), "fused_optimizer", Registry(), LONG)
    verdict = EvaluationsCheck().run(pair, budget)
    assert verdict.summary == "an evaluation has the same result"


@pytest.mark.parametrize("name", ["digits_classifier", "marl_baseline"])
def test_an_interrupted_evaluation_measures_a_part_and_the_next_one_all(name):
    isolation = Isolation(answers(tiny(name), Registry(), ()), 0)
    first, interrupted, last = isolation.advance([Query(), Query(stop_after=1), Query()], lambda returned: returned)
    assert interrupted["evaluate"] == {}
    assert first == last
    assert first["evaluate"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_part_of_the_held_out_data_of_every_recipe_can_be_evaluated(name):
    isolation = Isolation(answers(tiny(name), Registry(), ()), 0)
    (result,) = isolation.advance([Query(sample_limit=3)], lambda returned: returned)
    assert result["evaluate"]


class NumbersConfig(DatasetConfig):
    """Samples that are their own numbers."""

    kind = "numbers"
    implementation = "Numbers"
    provides = "numbers"
    train: int = 4
    held_out: int = 4
    is_mapped: bool = False


class Mapped:
    """A dataset that returns samples one by one."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


class Numbers(DatasetSource):
    def datasets(self, config):
        if config.is_mapped:
            return Mapped(config.train), Mapped(config.held_out)
        return {"number": torch.arange(config.train)}, {"number": torch.arange(config.held_out)}


def numbers(batch_size, **settings):
    context = Context(torch.device("cpu"), Slots(), 0, batch_size)
    return Numbers(NumbersConfig(**settings).recorded(), context)


def held_out_numbers(source):
    return [int(number) for batch in source.held_out_batches() for number in batch["number"]]


@given(st.integers(2, 40), st.integers(1, 6), st.booleans())
def test_parts_of_held_out_data_share_no_sample(count, batch_size, is_mapped):
    parts = []
    for number in (0, 1):
        source = numbers(batch_size, train=8, held_out=count, is_mapped=is_mapped)
        part = HeldOutPart(number)
        part(source)
        parts.append({*held_out_numbers(source)})
        assert part.modified() is None
    assert all(parts)
    assert not parts[0] & parts[1]
    assert len(parts[0]) == len(parts[1])


@given(st.integers(2, 40), st.integers(2, 40), st.booleans())
def test_samples_get_other_numbers_and_stay_as_many(train, held_out, is_mapped):
    source = numbers(2, train=train, held_out=held_out, is_mapped=is_mapped)
    before = held_out_numbers(source)
    renumber(source)
    assert source.epoch_samples(2) == train // 2 * 2
    assert len(held_out_numbers(source)) == held_out
    assert set(held_out_numbers(source)) < set(before)


def test_a_sample_that_is_changed_in_place_is_found():
    source = numbers(2)
    part = HeldOutPart(0)
    part(source)
    source.held_out.tensors["number"][0] = 7
    assert part.modified() == "number"


def test_a_single_held_out_sample_has_no_parts():
    with pytest.raises(UnchangeableDataError, match="no two samples by number"):
        HeldOutPart(0)(numbers(1, held_out=1))


@pytest.mark.parametrize("name", ["digits_classifier", "marl_baseline", "grasp_diffusion"])
def test_a_recipe_has_two_worlds_of_held_out_data(name):
    worlds = held_out_worlds(tiny(name))
    assert worlds is not None
    path = worlds[0].recipe.data.evaluation_seed
    if path is not None:
        assert worlds[0].recipe.data != worlds[1].recipe.data


@pytest.mark.parametrize(
    ("value", "is_exact", "name"),
    [(2.0, True, None), (2.00001, False, None), (2.00001, True, "loss"), (2.01, False, "loss"), (None, False, "loss")],
)
def test_metrics_are_compared_by_bits_or_up_to_rounding(value, is_exact, name):
    metrics = {} if value is None else {"loss": value}
    assert differing_metrics({"loss": 2.0}, metrics, is_exact=is_exact) == name
