"""``preprocess_once``: a sample is the same every time, whatever becomes of the one that was handed out."""

import numpy as np
import pytest
import torch

from runner.plugins.stages.preprocess_once import Kept


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
