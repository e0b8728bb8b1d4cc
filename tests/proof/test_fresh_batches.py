"""Batches of a measurement never repeat, and further ones are made of those given where that is possible."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runner.proof.difference import digest
from runner.proof.fresh_batches import FreshBatches
from runner.proof.trees import leaves


def content(batch):
    return tuple(digest(value) for _, value in leaves(batch))


def draw(source, count=60):
    fresh = FreshBatches(source)
    return [fresh.draw() for _ in range(count)]


def rows(count, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator)


SOURCES = {
    "one batch": [rows(16)],
    "a dictionary": [{"x": rows(8), "y": torch.arange(8)}, {"x": rows(8, seed=1), "y": torch.arange(8) + 8}],
    "a tuple": [(rows(8), torch.arange(8))],
    "tokens": [torch.arange(64).view(8, 8)],
    "a single sample": [{"x": rows(1), "y": torch.tensor([3])}],
    "a single text": [{"tokens": torch.arange(40).view(1, 40), "next": torch.arange(1, 41).view(1, 40)}],
    "a graph": [{"x": rows(5), "edges": torch.tensor([[0, 1], [1, 2]]), "size": torch.tensor(5)}],
    "half precision": [rows(4).to(torch.bfloat16)],
    "arrays": [{"x": rows(8).numpy(), "y": np.arange(8)}],
    "whole numbers as floats": [torch.ones(2, 4)],
    "sizes that differ": [rows(8), rows(6), rows(4)],
    "a loader": DataLoader(TensorDataset(rows(32), torch.arange(32)), batch_size=8),
    "a function": lambda: rows(4),
    "an iterator": iter([rows(8), rows(8, seed=2)]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_two_batches_have_the_same_content_and_all_have_the_form_of_one_given(name):
    batches = draw(SOURCES[name])
    assert len({content(batch) for batch in batches}) == len(batches)
    forms = [[(path, value.dtype, value.shape) for path, value in leaves(batch)] for batch in batches]
    assert all(form in forms[:4] for form in forms)


def test_samples_stay_whole_when_they_are_mixed():
    inputs = rows(16, seed=3)
    batches = draw([{"x": inputs[:8], "y": inputs[:8].sum(1)}, {"x": inputs[8:], "y": inputs[8:].sum(1)}])
    for batch in batches:
        assert torch.allclose(batch["x"].sum(1), batch["y"])
    sums = {round(float(batch["x"].sum()), 5) for batch in batches}
    assert len(sums) > 50  # so that a key that knows no order is another one, too


def test_what_cannot_be_mixed_keeps_its_whole_numbers_and_changes_by_a_thousandth():
    graph = SOURCES["a graph"][0]
    for batch in draw([graph], 20):
        assert torch.equal(batch["edges"], graph["edges"])
        assert torch.allclose(batch["x"], graph["x"], rtol=1.1e-3, atol=0)


def test_a_step_that_needs_an_order_of_samples_gets_one():
    lengths = torch.arange(8, 0, -1)
    fresh = FreshBatches([{"x": rows(8), "lengths": lengths}])

    def step(batch):
        if not torch.equal(batch["lengths"], lengths):
            raise RuntimeError("lengths have to be sorted")

    step(fresh.draw())
    fresh.probe(step)
    for _ in range(20):
        fresh.give(step, fresh.draw())


def test_batches_have_memory_of_their_own():
    given = rows(4)
    first, second = draw([given, given.clone()], 2)
    first.fill_(0)
    second.fill_(0)
    assert given.abs().sum() > 0


def test_a_step_that_draws_its_own_data_gets_nothing():
    assert draw([None]) == [None] * 60


@pytest.mark.parametrize("source", [["x", "y"], [1, 2], [torch.tensor(1)], [torch.tensor([2])], iter("ab")])
def test_what_cannot_be_renewed_is_refused_with_what_to_give(source):
    fresh = FreshBatches(source)
    with pytest.raises(ValueError, match=r"are too few .* give a function that returns a new batch"):
        list(iter(fresh.draw, None))


def test_a_function_may_return_anything_new():
    numbers = itertools.count()
    assert draw(lambda: next(numbers)) == list(range(60))
