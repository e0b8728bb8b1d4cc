"""Samples divided into folds: every sample is held out once, by a rule that follows from the seed."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import TRAINED, tiny
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from runner.api import Context, DatasetConfig, DatasetSource, RunnerError, Slots, TensorRows
from runner.plugin.folds import FoldsConfig, fold_numbers, pool
from runner.plugin.rows import SelectedRows
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.pipeline import assemble

DIVIDED = {"digits", "molecules", "posed_views"}
KEYS = st.lists(st.integers(0, 6), min_size=12, max_size=60).map(torch.tensor)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@given(KEYS, st.integers(2, 5), st.integers(0, 9))
def test_folds_are_equally_large_and_by_class_have_equal_shares(keys, count, seed):
    for by, given_keys in (("random", None), ("class", keys)):
        numbers = fold_numbers(len(keys), FoldsConfig(count=count, by=by), generator(seed), given_keys)
        sizes = numbers.bincount(minlength=count)
        assert sizes.max() - sizes.min() <= 1
        if by == "class":
            for key in keys.unique():
                shares = numbers[keys == key].bincount(minlength=count)
                assert shares.max() - shares.min() <= 1


@given(KEYS, st.integers(0, 9))
def test_groups_stay_together_in_folds_that_are_not_empty(keys, seed):
    count = min(4, len(keys.unique()))
    if count < 2:
        return
    numbers = fold_numbers(len(keys), FoldsConfig(count=count, by="group"), generator(seed), keys)
    assert all(len(numbers[keys == key].unique()) == 1 for key in keys.unique())
    sizes = numbers.bincount(minlength=count)
    assert sizes.min() > 0
    assert sizes.max() - sizes.min() <= max(Counter(keys.tolist()).values())


def test_other_seeds_divide_otherwise():
    first, again, other = (fold_numbers(50, FoldsConfig(count=5), generator(seed), None) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_few_samples_or_groups_are_refused():
    with pytest.raises(ValueError, match="it has 3 samples, and needs at least 5"):
        fold_numbers(3, FoldsConfig(count=5), generator(), None)
    with pytest.raises(ValueError, match="it has 2 groups, and needs at least 3"):
        fold_numbers(9, FoldsConfig(count=3, by="group"), generator(), torch.arange(9) % 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


ROWS = TensorRows({"x": torch.zeros(3, 2)})


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (Stream(), Stream(), "are a stream"),
        (SelectedRows(ROWS, torch.arange(2)), ROWS, "may overlap"),
        (ROWS, TensorDataset(torch.zeros(2)), "may overlap"),
        (TensorDataset(torch.zeros(2)), ConcatDataset([[1]]), "of different types"),
        (ROWS, TensorRows({"x": torch.zeros(3, 5)}), "have different tensors"),
    ],
)
def test_data_that_cannot_be_pooled_are_refused(train, held_out, message):
    with pytest.raises(ValueError, match=message):
        pool(train, held_out)


def test_both_sets_may_be_parts_of_one_dataset():
    """As ``random_split`` makes them."""
    data = TensorDataset(torch.arange(10))
    pooled = pool(Subset(data, [7, 1, 2]), Subset(data, [0, 9]))
    assert [int(pooled[number][0]) for number in range(5)] == [7, 1, 2, 0, 9]


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.rand(2)}


def test_samples_that_are_random_without_a_declaration_are_refused():
    class Source(DatasetSource):
        def datasets(self, config):
            return Augmented(), Augmented()

    class Config(DatasetConfig):
        """Random samples."""

        kind, provides, implementation = "augmented", "rows", "Missing"

    context = Context(torch.device("cpu"), Slots(), 0, batch_size=4)
    with pytest.raises(UsageError, match=r"data.folds: .* sample 0 of the training data uses random numbers"):
        Source(Config(folds={"count": 4}), context)
    assert len(Source(Config(), context).held_out) == 8


def sources_of(name, *sets, count=3):
    return [
        assemble(tiny(name, *sets, f"data.folds={{count: {count}, index: {index}}}")).source for index in range(count)
    ]


def test_every_sample_is_held_out_once_and_not_trained_on():
    plain = assemble(tiny("digits_classifier")).source
    samples = len(plain.train) + len(plain.held_out)
    pixels = torch.cat([plain.train.tensors["image"], plain.held_out.tensors["image"]])
    sources = sources_of("digits_classifier")
    assert torch.cat([source.fold_samples for source in sources]).sort().values.tolist() == list(range(samples))
    for source in sources:
        assert len(source.train) + len(source.held_out) == samples
        assert torch.equal(source.held_out.tensors["image"], pixels[source.fold_samples])
        everything = torch.arange(len(source.train))
        trained = {tuple(row.flatten().tolist()) for row in source.train.take(everything)["image"]}
        assert source.epoch_samples(16) == len(source.train) // 16 * 16
        assert source.fingerprint() == plain.fingerprint()
        # A few digits of the collection are the same to the pixel.
        unseen = [row for row in pixels[source.fold_samples] if tuple(row.flatten().tolist()) not in trained]
        assert len(unseen) > 0.99 * len(source.fold_samples)


def test_folds_by_class_and_limits_and_balanced_samples_work_together():
    sets = (
        "data.folds={count: 4, index: 1, by: class}",
        "data.limit={train: 0.5, held_out: 0.5}",
        "data.sampling=balanced",
    )
    source = assemble(tiny("digits_classifier", *sets)).source
    counts = torch.tensor(source.class_counts())
    assert counts.sum() == len(source.train)
    assert len(source.fold_samples) == len(source.held_out) == len(source.held_out_labels())
    assert torch.equal(source._balanced_labels, source.labels())


def recipes_by_source():
    """Returns a recipe that ships for each source that ships."""
    return {tiny(name).data.kind: name for name in TRAINED}


def refusal(name):
    """Returns why the samples of a recipe cannot be divided; None if they can."""
    try:
        pipeline = assemble(tiny(name, "data.folds={count: 3}"))
    except RunnerError as error:
        return str(error)
    assert len(pipeline.source.fold_samples) == len(pipeline.source.held_out)
    return None


def test_every_source_that_ships_is_divided_or_refused_in_one_line_with_the_reason():
    refusals = {kind: refusal(name) for kind, name in recipes_by_source().items()}
    assert {kind for kind, reason in refusals.items() if reason is None} == DIVIDED
    # The line of the recipe may follow the message.
    messages = [reason.splitlines()[0] for reason in refusals.values() if reason is not None]
    assert [message for message in messages if "data.folds" not in message] == []


def test_how_samples_are_divided_is_enough_and_the_number_of_folds_may_follow():
    assert tiny("digits_classifier", "data.folds={by: class}").data.folds == FoldsConfig(count=5, by="class")
    assignments = "data.folds={by: class}", "data.folds.count=3", "data.folds.index=2"
    assert tiny("digits_classifier", *assignments).data.folds == FoldsConfig(count=3, index=2, by="class")


def test_a_class_that_the_samples_do_not_have_is_refused():
    with pytest.raises(UsageError, match=r"data\.folds: 'digits' cannot be divided: it has no group of each sample"):
        assemble(tiny("digits_classifier", "data.folds={count: 3, by: group}"))


def test_a_fold_that_does_not_exist_is_refused_with_its_place():
    with pytest.raises(RecipeError, match=r"data\.folds: index 3 exceeds the last of 3 folds"):
        tiny("digits_classifier", "data.folds={count: 3, index: 3}")
