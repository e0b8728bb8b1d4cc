"""``preprocess_once``: a sample is the same every time, whatever becomes of the one that was handed out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import source_of

from runner.api import UsageError
from runner.plugins.stages.preprocess_once import Kept, PreprocessOnce, PreprocessOnceConfig, copy_sample


class Reusing:
    """Makes every sample in the same memory."""

    def __init__(self, many):
        self.tensor, self.array, self.made = torch.zeros(2), np.zeros(2), 0
        if many:
            self.__class__ = ReusingMany

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.made += 1
        self.tensor.fill_(index)
        self.array[:] = index
        return {"tensor": self.tensor, "arrays": [self.array], "label": index}


class ReusingMany(Reusing):
    def __getitems__(self, indices):
        return [{"tensor": torch.full((2,), float(i)), "arrays": [np.full(2, i)], "label": i} for i in indices]


@pytest.mark.parametrize("many", [False, True])
def test_samples_are_copies(many):
    kept = Kept(Reusing(many))
    for _ in range(3):
        samples = kept.__getitems__([2, 0, 3, 2])
        assert [sample["tensor"].tolist() for sample in samples] == [[2.0, 2.0], [0.0, 0.0], [3.0, 3.0], [2.0, 2.0]]
        assert [sample["arrays"][0].tolist() for sample in samples] == [[2, 2], [0, 0], [3, 3], [2, 2]]
        for sample in samples:  # as a collate function may do
            sample["tensor"] += 10
            sample["arrays"][0] *= 0
            assert sample.pop("label") in (0, 2, 3)
    assert kept.found == 12 - 3
    assert kept.data.made == (0 if many else 3)


class PartlyRandom:
    """Samples from the third on are random."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": self.generator.random() if index > 2 else index}


class PartlyRandomMany(PartlyRandom):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [PartlyRandom, PartlyRandomMany])
def test_samples_that_are_found_to_be_random_are_not_kept(kind):
    kept, plain = Kept(kind()), kind()
    for indices in ([1, 2], [2, 3, 1, 3], [3, 2, 4]):
        assert kept.__getitems__(indices) == [plain[index] for index in indices]


def test_a_source_with_random_samples_is_refused():
    pipeline = SimpleNamespace(source=source_of(PartlyRandom()))
    with pytest.raises(UsageError, match="would freeze random samples: sample 8 of the training data uses random"):
        PreprocessOnce(PreprocessOnceConfig()).attach(pipeline)


ROWS = torch.arange(24.0).reshape(4, 6)
VALUES = st.sampled_from([
    lambda: torch.arange(3), lambda: torch.zeros(0), lambda: torch.tensor(1.5), lambda: ROWS[1], lambda: ROWS[:, 2],
    lambda: ROWS.T, lambda: ROWS.bfloat16(), lambda: torch.eye(3).to_sparse(), lambda: np.arange(3), lambda: "text",
    lambda: torch.ones(2, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(2)), lambda: [torch.ones(2), 1],
])  # fmt: skip


def same_value(left, right):
    if isinstance(left, list):
        return all(map(same_value, left, right))
    if isinstance(left, torch.Tensor):
        traits = [(type(x), x.dtype, x.shape, x.layout, x.requires_grad, x.is_leaf) for x in (left, right)]
        return traits[0] == traits[1] and torch.equal(left.to_dense(), right.to_dense())
    return type(left) is type(right) and np.array_equal(left, right)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.booleans())
def test_a_copy_has_the_same_values_in_memory_of_its_own(makers, is_tuple):
    before = ROWS.clone()
    sample = {key: make() for key, make in makers.items()}
    copied = copy_sample(tuple(sample.values()) if is_tuple else sample)
    copies = list(copied if is_tuple else copied.values())
    assert type(copied) is (tuple if is_tuple else dict)
    assert is_tuple or list(copied) == list(sample)
    assert all(map(same_value, sample.values(), copies))
    for value in copies:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.requires_grad:
            value.zero_()
    assert torch.equal(ROWS, before)


def test_values_that_share_memory_share_it_in_the_copy():
    whole = torch.arange(6.0)
    copied = copy_sample({"whole": whole, "half": whole[3:]})
    copied["whole"].zero_()
    assert copied["half"].tolist() == [0, 0, 0]
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_row_of_a_batch_does_not_keep_the_batch_in_memory():
    copied = copy_sample({"row": ROWS[1]})
    assert copied["row"].untyped_storage().nbytes() == copied["row"].nbytes
