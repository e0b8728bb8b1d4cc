"""Batches of streams: each follows from its number, whatever ``collate`` does, and whoever reads the stream."""

import os
import random

import numpy as np
import pytest
import torch
from records import drawn
from torch.utils.data import IterableDataset

from runner.api import Context, DatasetConfig, DatasetSource, Slots
from runner.plugin.collating import copy_samples


class Config(DatasetConfig):
    """A stream."""

    kind = "stream"
    implementation = "Missing"
    provides = "rows"


class Stream(IterableDataset):
    """Samples of different sizes."""

    def __init__(self, reader=None, count=10):
        self.dataset = reader
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            epoch = 0 if self.dataset is None else self.dataset.epoch
            yield {"index": torch.tensor(number + 100.0 * epoch), "mask": [1.0] * (number + 1)}


class Reader:
    """Knows its epoch; several streams may read from it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


class Forwarding(Stream):
    """Passes the epoch on."""

    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)


def scale(samples):
    for sample in samples:
        sample["index"].mul_(0.5)
        sample["index"] += 1
    return torch.stack([sample["index"] for sample in samples])


def pop(samples):
    return torch.stack([sample.pop("index") for sample in samples])


def pad(samples):
    longest = max(len(sample["mask"]) for sample in samples)
    for sample in samples:
        sample["mask"] += [0.0] * (longest + 1 - len(sample["mask"]))
    return torch.tensor([sample["mask"] for sample in samples])


class Source(DatasetSource):
    """Whose ``collate`` changes samples, or draws."""

    change = None
    kind = None
    pair = None, None

    def datasets(self, config):
        return self.pair

    def collate(self, samples):
        index = torch.stack([sample["index"] for sample in samples]).clone()
        if self.change is not None:
            return {"index": index, "changed": type(self).change(samples)}
        if self.kind is None:
            return {"index": index}
        if not hasattr(self, "rng"):
            self.rng = GENERATORS[self.kind]()
        return {"index": index, "changed": torch.tensor([float(self.rng.random()) for _ in samples])}


GENERATORS = {"numpy": np.random.default_rng, "python": random.Random}


def source_of(train, held_out=None, workers=0, *, change=None, kind=None, rng=None):
    Source.pair = train, [{"index": torch.tensor(0.0), "mask": [1.0]}] if held_out is None else held_out
    members = {"change": change, "kind": kind, "datasets": Source.datasets}
    if rng is not None:
        members["datasets"] = lambda self, config: setattr(self, "rng", rng) or self.pair
    cls = type("Made", (Source,), members)
    return cls(Config(workers=workers), Context(torch.device("cpu"), Slots(), 3, batch_size=4))


def changed(batches):
    return [batch["changed"].tolist() for batch in batches]


@pytest.mark.parametrize("change", [scale, pop, pad])
def test_the_first_batch_is_made_of_untouched_samples(change):
    samples = list(Stream())
    expected = [change(copy_samples(samples[start : start + 4])).tolist() for start in (0, 4, 0)]
    assert changed(drawn(source_of(Stream(), change=change), 3)) == expected


def test_copies_share_nothing_that_can_be_changed():
    memory = torch.arange(1000.0)
    grown = (memory[:3].clone().requires_grad_() * 2).view(3)
    with open(os.devnull) as file:
        sample = {"view": memory[2:4], "list": [1, [2]], "array": np.ones(2), "grown": grown, "file": file}
        (copied,) = copy_samples([sample])
        assert copied["file"] is file
    copied["view"].add_(1)
    copied["list"][1].append(3)
    copied["array"] += 1
    copied.pop("grown")
    assert sample["view"].tolist() == [2.0, 3.0]
    assert sample["list"] == [1, [2]]
    assert sample["array"].tolist() == [1.0, 1.0]
    assert "grown" in sample
    assert copied["view"].untyped_storage().nbytes() < memory.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("is_made_early", [True, False])
def test_generators_of_collate_are_seeded_by_the_number_of_the_batch(kind, is_made_early):
    streams = []
    for workers in (0, 1):
        rng = GENERATORS[kind](7) if is_made_early else None
        source = source_of(Stream(), Stream(), workers, kind=kind, rng=rng)
        batches = drawn(source, 2)
        held_out = [changed(source.held_out_batches()) for _ in range(2)]
        assert held_out[0] == held_out[1]
        batches += drawn(source, 2)
        streams.append((changed(batches), held_out))
    assert streams[0] == streams[1]
    numbers = [number for batch in streams[0][0] for number in batch]
    assert len(set(numbers)) == len(numbers)

    resumed = source_of(Stream(), Stream(), kind=kind, rng=GENERATORS[kind](8) if is_made_early else None)
    resumed.load_state_dict({"consumed": 3})
    assert changed(drawn(resumed, 1)) == streams[0][0][3:]


@pytest.mark.parametrize("stream", [Stream, Forwarding])
def test_an_evaluation_leaves_the_epoch_of_a_shared_reader_alone(stream):
    reader = Reader()
    source = source_of(stream(reader), stream(reader, 4))
    expected = drawn(source_of(Forwarding(Reader())), 6)
    batches = []
    for _ in range(6):
        batches += drawn(source, 1)
        (held_out,) = source.held_out_batches()
        assert held_out["index"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [batch["index"].tolist() for batch in batches] == [batch["index"].tolist() for batch in expected]


def test_an_epoch_is_told_once_unless_another_dataset_is_told():
    told = []

    class Noting(Forwarding):
        def set_epoch(self, epoch):
            told.append(epoch)

    drawn(source_of(Noting(Reader())), 6)
    assert told == [0, 1, 2]
