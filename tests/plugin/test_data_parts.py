"""Parts of a dataset: some held-out samples are set aside, or a source has test data of its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from runner.api import Context, DatasetConfig, DatasetSource, Mean, RunnerError, Slots, TensorRows, UsageError
from runner.plugin.configs import LimitConfig
from runner.plugin.folds import FoldsConfig
from runner.plugins.sequences.windows import Windows

CPU = torch.device("cpu")
SHARES = st.floats(0.05, 0.95)


class Numbers(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"number": self.numbers[index]}


class Stream(IterableDataset):
    def __iter__(self):
        yield {"number": torch.tensor(0)}


class Config(DatasetConfig):
    """Anything."""

    kind = "anything"
    implementation = "Missing"
    provides = "rows"


class Means:
    """Measures the mean of all numbers that an evaluation reads."""

    def evaluating(self):
        return torch.no_grad()

    def metrics(self, batch):
        return {"mean": Mean(batch["number"].sum(), len(batch["number"]))}


def rows(first, last):
    return {"number": torch.arange(first, last)}


def items(first, last):
    return Numbers(torch.arange(first, last))


def source_of(*parts, seed=3, batch_size=4, **settings):
    made = type("Made", (DatasetSource,), {"datasets": lambda self, config: parts})
    return made(Config(**settings), Context(CPU, Slots(), seed, batch_size=batch_size))


def held_out_numbers(source):
    return [number for batch in source.held_out_batches() for number in batch["number"].tolist()]


def numbers_of_the_test(source):
    with source.testing():
        return held_out_numbers(source)


@pytest.mark.parametrize("kind", [rows, items])
def test_a_share_is_set_aside_the_same_for_every_seed_and_the_training_data_stay(kind):
    source, other_seed = (source_of(kind(0, 20), kind(20, 50), test=0.4, seed=seed) for seed in (3, 4))
    validation, test = held_out_numbers(source), numbers_of_the_test(source)
    assert len(test) == 12
    assert sorted(validation + test) == [*range(20, 50)]
    assert validation == sorted(validation)
    assert (held_out_numbers(other_seed), numbers_of_the_test(other_seed)) == (validation, test)
    assert source.epoch_samples(4) == 20
    assert source.evaluate(Means()) == {"mean": sum(validation) / len(validation)}
    with source.testing():
        assert source.evaluate(Means()) == {"mean": sum(test) / len(test)}
    assert held_out_numbers(source) == validation


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(6,), (6, 2)])
def test_tables_may_have_numbers_of_any_type(dtype, shape):
    table = torch.arange(6).reshape(6, *(1 for _ in shape[1:])).expand(shape).to(dtype)
    index = torch.tensor([4, 0, 4])
    (taken,) = TensorRows({"x": table}).take(index).values()
    assert taken.dtype == dtype
    assert torch.equal(taken.double(), table.double()[index])


class Patients(Numbers):
    """Numbers in groups, as a map-style dataset has them."""

    def __init__(self, numbers, groups):
        super().__init__(numbers)
        self.groups = groups


def grouped(groups):
    numbers = torch.arange(len(groups))
    return [{"number": numbers, "group": torch.tensor(groups)}, Patients(numbers, groups)]


@given(st.lists(st.integers(-3, 6), min_size=6, max_size=30).filter(lambda groups: len({*groups}) > 1), SHARES)
def test_a_group_is_in_one_part(groups, share):
    for data in grouped(groups):
        source = source_of(rows(0, 8), data, test=share)
        validation, test = held_out_numbers(source), numbers_of_the_test(source)
        assert sorted(validation + test) == [*range(len(groups))]
        assert validation == sorted(validation)
        assert {groups[number] for number in validation} & {groups[number] for number in test} == set()
        assert validation
        # The last group that was drawn may be larger than what was missing.
        largest = max(map(groups.count, groups))
        assert 0 < len(test) < max(1, round(share * len(groups))) + largest


def test_a_single_group_cannot_be_divided():
    for data in grouped([7] * 6):
        with pytest.raises(UsageError, match=r"data.test: the held-out samples of 'anything' are one group"):
            source_of(rows(0, 8), data, test=0.5)


def test_folds_by_group_and_test_data_share_no_group():
    def patients(first, last, size):
        numbers = torch.arange(first, last)
        return Patients(numbers, (numbers // size).tolist())

    folds = FoldsConfig(count=2, by="group")
    source = source_of(patients(0, 24, 4), patients(24, 60, 4), test=0.4, folds=folds)
    parts = [[*source.train], [*source.held_out], [*source.test]]
    numbers = [{int(sample["number"]) // 4 for sample in part} for part in parts]
    assert sum(map(len, numbers)) == 15
    assert set.union(*numbers) == {*range(15)}
    with pytest.raises(UsageError, match=r"data.folds: .* a group of its test data has training samples, too"):
        source_of(patients(0, 30, 6), patients(30, 60, 12), test=0.4, folds=folds)


def test_a_source_may_have_test_data_of_its_own_and_workers_read_them():
    for data in (rows, items):
        source = source_of(data(0, 8), data(8, 12), data(12, 18))
        assert source.has_test()
        assert (held_out_numbers(source), numbers_of_the_test(source)) == ([*range(8, 12)], [*range(12, 18)])
    source = source_of(items(0, 8), items(8, 12), items(12, 18), workers=1)
    assert (held_out_numbers(source), numbers_of_the_test(source)) == ([*range(8, 12)], [*range(12, 18)])
    assert not source_of(rows(0, 8), rows(8, 12)).has_test()
    assert not source_of(rows(0, 8), rows(8, 12), None).has_test()


def test_an_error_inside_of_a_test_leaves_the_held_out_data_as_they_were():
    source = source_of(rows(0, 8), rows(8, 12), rows(12, 18))
    with pytest.raises(ZeroDivisionError), source.testing():
        raise ZeroDivisionError
    assert held_out_numbers(source) == [*range(8, 12)]


def test_limits_and_folds_apply_to_a_source_with_test_data():
    limit = LimitConfig(train=0.5, held_out=0.5)
    without = source_of(rows(0, 40), rows(40, 60), limit=limit)
    limited = source_of(rows(0, 40), rows(40, 60), rows(60, 80), limit=limit)
    assert held_out_numbers(limited) == held_out_numbers(without)
    assert len(numbers_of_the_test(limited)) == 10
    assert torch.equal(limited.train.take(torch.arange(20))["number"], without.train.take(torch.arange(20))["number"])

    divided = source_of(rows(0, 20), rows(20, 30), rows(30, 35), folds=FoldsConfig(count=5))
    plain = source_of(rows(0, 20), rows(20, 30), folds=FoldsConfig(count=5))
    assert held_out_numbers(divided) == held_out_numbers(plain)
    assert numbers_of_the_test(divided) == [*range(30, 35)]
    for kind in (rows, items):
        folds = [
            source_of(kind(0, 20), kind(20, 30), test=0.5, folds=FoldsConfig(count=5, index=index))
            for index in range(5)
        ]
        tested = numbers_of_the_test(folds[0])
        assert len(tested) == 5
        held_out = [number for fold in folds for number in held_out_numbers(fold)]
        assert sorted(held_out + tested) == [*range(30)]


def test_the_fingerprint_is_that_of_all_data():
    plain = source_of(rows(0, 8), rows(8, 12))
    assert source_of(rows(0, 8), rows(8, 12), test=0.5).fingerprint() == plain.fingerprint()
    tested = source_of(rows(0, 8), rows(8, 12), rows(12, 18))
    assert tested.fingerprint() != plain.fingerprint()
    assert tested.fingerprint() != source_of(rows(0, 8), rows(8, 12), rows(12, 19)).fingerprint()


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ((rows(0, 8), rows(8, 12), rows(12, 18)), {"test": 0.5}, "data.test: 'anything' has test data of its own"),
        ((rows(0, 8), Stream()), {"test": 0.5}, "data.test: the held-out samples of 'anything' are a stream"),
        ((rows(0, 8), rows(8, 9)), {"test": 0.5}, "data.test: 'anything' has 1 held-out samples, too few"),
        ((rows(0, 8), rows(8, 12), items(0, 0)), {}, "data: no sample to test on"),
        ((rows(0, 8), rows(8, 12), rows(0, 0)), {}, "data: no sample to test on"),
        ((rows(0, 8),), {}, "should return a pair, .* or three with what to test on, got tuple of 1"),
    ],
)
def test_test_data_that_cannot_be_used_are_refused(parts, settings, message):
    with pytest.raises((UsageError, RunnerError), match=message):
        source_of(*parts, **settings)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_parts_of_windows_predict_every_token_once(share):
    windows = Windows(torch.arange(50), context=6, stride=6)

    def predicted(part):
        starts = part.take(torch.arange(len(part)))["tokens"][:, 1:].flatten().tolist()
        return starts + part.remainder()[1:].tolist()

    first, last = windows.parts(share)
    assert predicted(first) + predicted(last) == predicted(windows) == [*range(1, 50)]
    assert predicted(first)
    assert predicted(last)
