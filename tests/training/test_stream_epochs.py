"""Epochs need a number of samples: streams that report none are refused before anything is trained."""

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from toys import LENGTH, WORDS, ToyConfig

from runner.api import DatasetConfig, DatasetSource, UsageError
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.training.pipeline import assemble


def words(number):
    return {"words": (torch.arange(LENGTH) + number) % WORDS}


class Stream(IterableDataset):
    """24 sentences, without a length."""

    def __iter__(self):
        yield from map(words, range(24))


class Sharded(IterableDataset):
    """A stream of which each worker reads its share."""

    def __iter__(self):
        worker = get_worker_info()
        first = 0 if worker is None else worker.id
        yield from map(words, range(first, 24, 1 if worker is None else worker.num_workers))


class Unmeasured(Stream):
    """A stream whose length cannot be computed."""

    def __len__(self):
        raise TypeError("the archive has no index")


class Measured(Stream):
    """The same stream with its length."""

    def __len__(self):
        return 24


STREAMS = {
    "plain": Stream,
    "sharded": Sharded,
    "unmeasured": Unmeasured,
    "chained": lambda: ChainDataset([Stream(), Stream()]),
    "measured": Measured,
}


class StreamConfig(DatasetConfig):
    """Sentences that come as a stream."""

    kind = "toy_stream"
    implementation = "StreamSource"
    provides = "toy_words"
    stream: str = "plain"


class StreamSource(DatasetSource):
    def datasets(self, config):
        return STREAMS[config.stream](), [words(number) for number in range(8)]


def pipeline(optimization=None, **settings):
    values = {
        "name": "stream",
        "device": "cpu",
        "model": {"kind": "toy"},
        "data": {"kind": "toy_stream", "stream": settings.pop("stream")},
        "train": {"batch_size": 8, **settings},
        "optimization": optimization or {},
    }
    return assemble(load(values, [], Registry([ToyConfig, StreamConfig])))


@pytest.mark.parametrize("stream", ["plain", "sharded", "unmeasured", "chained"])
@pytest.mark.parametrize("epochs", [1, 20])
def test_epochs_of_a_stream_without_a_length_are_refused(stream, epochs):
    message = r"train\.epochs: 'toy_stream' does not report how long an epoch is: use train\.updates or train\.samples"
    with pytest.raises(RecipeError, match=message):
        pipeline(stream=stream, epochs=epochs)


@pytest.mark.parametrize("stream", ["plain", "sharded", "unmeasured", "chained"])
def test_other_units_of_such_a_stream_are_trained(stream):
    made = pipeline(stream=stream, updates=4)
    assert made.slots.next_batch(8, made.progress)["words"].shape == (8, LENGTH)


def test_epochs_of_a_stream_with_a_length_are_trained():
    made = pipeline(stream="measured", epochs=20)
    assert made.progress.epoch_samples == 24


DIVISORS = {"gradient_accumulation": {"micro_batch": 4, "divisors": [{"epoch": 1, "divisor": 4}]}}


@pytest.mark.parametrize("stream", ["plain", "sharded", "unmeasured", "chained"])
def test_parts_by_epoch_of_a_stream_without_a_length_are_refused(stream):
    with pytest.raises(UsageError, match=r"gradient_accumulation\.divisors: .* has no epochs: use micro_batch"):
        pipeline(stream=stream, updates=4, optimization=DIVISORS)


def test_parts_by_epoch_of_a_stream_with_a_length_are_computed():
    made = pipeline(stream="measured", updates=4, optimization=DIVISORS)
    assert made.stages["gradient_accumulation"].config.part_size(8, 1) == 2
