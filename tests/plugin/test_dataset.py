"""Sources that draw from a dataset: what they draw, and that a resumed run draws the same."""

import random
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from runner.api import Context, DatasetConfig, DatasetSource, Mean, Progress, RunnerError, Slots, UsageError
from runner.plugin import loading
from runner.plugin.repeatability import describe_randomness

CPU = torch.device("cpu")


class Augmented(Dataset):
    """Samples with noise from every generator that a transform may use."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        return {"index": index, "value": torch.tensor(index + noise)}


class Ragged(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.arange(index % 5 + 1)


class Stream(IterableDataset):
    """Counts, beginning elsewhere in every epoch."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.count):
            yield {"index": self.epoch * 1000 + number, "value": torch.rand(())}


class Config(DatasetConfig):
    """Anything."""

    kind = "anything"
    implementation = "Missing"
    provides = "rows"


def source_of(data, workers=0, seed=3, held_out=None, prefetch=4, pin=True, **methods):
    body = {"datasets": lambda self, config: (data, data if held_out is None else held_out), **methods}
    made = type("Made", (DatasetSource,), body)
    return made(Config(workers=workers, prefetch=prefetch, pin=pin), Context(CPU, Slots(), seed, batch_size=4))


@pytest.mark.parametrize("prefetch", [1, 9])
def test_workers_have_as_many_batches_ready_as_configured(prefetch, monkeypatch):
    """The batches are the same; a worker reads that far ahead."""
    options = []

    class Recording(loading.DataLoader):
        def __init__(self, *arguments, **named):
            options.append(named)
            super().__init__(*arguments, **named)

    monkeypatch.setattr(loading, "DataLoader", Recording)
    source = source_of(Augmented(22), workers=1, prefetch=prefetch)
    assert same(drawn(source, 7), drawn(source_of(Augmented(22)), 7))
    assert prefetch in {named.get("prefetch_factor") for named in options}


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_pinned_for_a_gpu_unless_switched_off(pin, device, monkeypatch):
    pinned = []
    source = source_of(Ragged(), pin=pin)
    monkeypatch.setattr("runner.plugin.dataset.load_batches", lambda *_, **named: pinned.append(named["pinned"]))
    source.device = torch.device(device)
    source.held_out_batches()
    assert pinned == [pin and device == "cuda"]


def test_a_prefetch_without_workers_is_not_read():
    config = Config(prefetch=2).recorded()
    made = type("Made", (DatasetSource,), {"datasets": lambda self, config: (Augmented(22), Augmented(22))})
    drawn(made(config, Context(CPU, Slots(), 3, batch_size=4)), 2)
    assert "prefetch" in config.unread()
    assert "workers" not in config.unread()


def drawn(source, count, size=4):
    progress = Progress("updates", 1000)
    batches = []
    for _ in range(count):
        batches.append(source.draw(size, progress))
        source.counts(batches[-1])
    return batches


def same(one, other):
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in ("index", "value")
        if name in a
    )


def rows(count):
    return {"index": torch.arange(count), "value": torch.arange(count) * 0.5}


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), size=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_but_those_of_a_smaller_last_batch(count, size, epochs, seed):
    source = source_of(rows(count), seed=seed)
    if size > count:
        with pytest.raises(UsageError, match=r"train\.batch_size"):
            source.draw(size, Progress("updates", 10))
        return
    whole = source.epoch_samples(size)
    assert whole == count // size * size
    for _ in range(epochs):
        seen = torch.cat([batch["index"] for batch in drawn(source, whole // size, size)]).tolist()
        assert len(set(seen)) == len(seen) == whole


def test_epochs_are_shuffled_by_seed_and_by_their_number():
    first, again, other = (drawn(source_of(rows(32), seed=seed), 16) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first[:8], other[:8])
    assert not same(first[:8], first[8:])


@settings(max_examples=25, deadline=None)
@given(consumed=st.integers(0, 30), ahead=st.integers(0, 5))
def test_a_source_goes_on_after_what_was_learnt_from_whatever_was_drawn_ahead(consumed, ahead):
    expected = drawn(source_of(Augmented(14)), consumed + 5)
    source = source_of(Augmented(14))
    drawn(source, consumed)
    for _ in range(ahead):
        source.draw(4, Progress("updates", 10))
    resumed = source_of(Augmented(14))
    resumed.load_state_dict(source.state_dict())
    assert same(expected[consumed:], drawn(resumed, 5))


@pytest.mark.parametrize(("data", "workers"), [(Augmented(22), 2), (Stream(22), 1)], ids=["map-style", "iterable"])
def test_workers_resume_in_the_middle_of_an_epoch(data, workers):
    expected = drawn(source_of(data), 9)
    before = source_of(data, workers=workers)
    drawn(before, 7)
    resumed = source_of(data, workers=workers)
    resumed.load_state_dict(before.state_dict())
    assert same(expected[7:], drawn(resumed, 2))


def test_batches_are_the_same_with_and_without_workers():
    assert same(drawn(source_of(Augmented(22)), 7), drawn(source_of(Augmented(22), workers=2), 7))


def test_drawing_leaves_the_global_generators_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn(source_of(Augmented(22)), 5)
    found = random.random(), np.random.rand(), torch.rand(3)
    assert expected[:2] == found[:2]
    assert torch.equal(expected[2], found[2])


class Growing(Dataset):
    """Values depend on the epoch."""

    def __init__(self, count):
        self.count, self.epoch = count, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"index": index, "value": torch.tensor(self.epoch)}


GROWING = {
    "itself": lambda: Growing(22),
    "subset": lambda: Subset(Growing(30), range(22)),
    "concatenated": lambda: ConcatDataset([Growing(10), Subset(Growing(12), range(12))]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", GROWING.values(), ids=GROWING.keys())
def test_a_map_style_dataset_is_told_of_its_epoch_also_after_a_resume(make, workers):
    # An epoch has five batches of four samples.
    batches = drawn(source_of(make(), workers=workers, held_out=rows(4)), 12)
    assert [set(batch["value"].tolist()) for batch in batches] == [{0}] * 5 + [{1}] * 5 + [{2}] * 2
    resumed = source_of(make(), workers=workers, held_out=rows(4))
    resumed.load_state_dict({"consumed": 7})
    assert same(drawn(resumed, 5), batches[7:])


def test_samples_that_depend_on_the_epoch_are_not_kept():
    reason = describe_randomness(source_of(Subset(Growing(30), range(22)), held_out=rows(4)))
    assert reason == "the training data have set_epoch, so their samples may differ between epochs"


def test_an_iterable_dataset_begins_anew_with_another_epoch():
    seen = [batch["index"].tolist() for batch in drawn(source_of(Stream(9)), 4)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]
    assert source_of(Stream(9)).epoch_samples(4) is None


def test_an_iterable_dataset_that_has_no_batch_is_said():
    with pytest.raises(UsageError, match="not a single batch"):
        drawn(source_of(Stream(3)), 1)


@pytest.mark.parametrize(
    ("given", "workers", "said"),
    [
        ({"index": torch.arange(8), "value": torch.arange(9)}, 0, "'index' has 8, 'value' has 9"),
        ({"index": torch.arange(8), "value": torch.tensor(0.5)}, 0, "'index' has 8, 'value' has 0"),
        ({"index": np.arange(8)}, 0, "'index' should be a tensor, got ndarray; torch.from_numpy makes it one"),
        ({}, 0, "one row for each sample, but got no tensor"),
        (Stream(22), 2, "data.workers: 2 are too many for 'anything'"),
    ],
)
def test_what_nobody_can_train_on_is_refused(given, workers, said):
    with pytest.raises(RunnerError, match=re.escape(said)):
        source_of(given, workers=workers)


def test_datasets_are_a_pair():
    with pytest.raises(
        RunnerError, match=r"Made\.datasets in .*test_dataset.py:\d+ should return a pair, .*, got dict"
    ):
        source_of(None, datasets=lambda self, config: {"index": torch.arange(8), "value": torch.arange(8)})


def test_held_out_streams_are_read_once_whatever_the_number_of_workers():
    batches = source_of(Augmented(8), workers=2, held_out=Stream(9)).held_out_batches()
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(9))


def test_samples_of_different_shapes_are_what_collate_makes_of_them():
    source = source_of(Ragged(), collate=lambda self, samples: {"edges": torch.cat(samples), "graphs": len(samples)})
    batch = drawn(source, 1)[0]
    assert batch["graphs"] == 4
    assert batch["edges"].dim() == 1


def test_held_out_batches_are_evaluated_by_sums_and_counts():
    class Learner:
        def metrics(self, batch):
            return {"value": Mean(batch["value"].sum(), len(batch["value"]))}

        def evaluating(self):
            from contextlib import nullcontext

            return nullcontext()

    held_out = rows(7)
    for data in (held_out, [{name: tensor[i] for name, tensor in held_out.items()} for i in range(7)]):
        found = source_of(rows(8), held_out=data).evaluate(Learner())
        assert found == {"value": pytest.approx(held_out["value"].mean().item())}


def test_shapes_are_those_of_a_batch_without_its_size():
    assert source_of(rows(8)).shapes == {"index": (), "value": ()}
    assert source_of({"image": torch.zeros(9, 3, 4)}).shapes == {"image": (3, 4)}


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), limit=st.integers(1, 45), size=st.integers(1, 9))
def test_a_limited_evaluation_sees_samples_evenly_spread(count, limit, size):
    source = source_of(rows(40), held_out=rows(count))
    source.context = replace(source.context, batch_size=size)
    source.limit_evaluation(limit)
    batches = list(source.held_out_batches())

    numbers = torch.cat([batch["index"] for batch in batches]).tolist()
    assert len(numbers) == min(count, limit)
    assert numbers == sorted(set(numbers))
    gaps = [later - earlier for earlier, later in pairwise([*numbers, count])]
    assert max(gaps) - min(gaps) <= 1
    assert all(len(batch["index"]) == size for batch in batches[:-1])
