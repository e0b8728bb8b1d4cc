"""Losses of buckets that do not fit together are refused in one line."""

from types import SimpleNamespace

import pytest
import torch

from runner.api import BatchLayout, Loss, RunnerError, Slots, Source
from runner.plugins.stages.bucketing import Bucketing, BucketingConfig

LENGTHS = torch.tensor([1, 5, 2, 4])


class Padded(Source):
    layout = BatchLayout(totals={"tokens"})

    def __init__(self):
        pass

    def draw(self, batch_size, progress):
        raise NotImplementedError

    def evaluate(self, learner):
        raise NotImplementedError

    def buckets(self, batch):
        for index in batch["n"].argsort().split(2):
            bucket = self.take(batch, index)
            bucket["x"] = bucket["x"][:, : int(bucket["n"].max())]
            yield index, bucket


class Net:
    noise_layout = BatchLayout()
    config = SimpleNamespace(draws=lambda: False)

    def loss(self, batch, noise, progress):
        raise NotImplementedError


def bucketed(loss, noise):
    slots = Slots()
    slots.define(loss=loss)
    Bucketing(BucketingConfig()).attach(SimpleNamespace(learner=Net(), source=Padded(), slots=slots))
    batch = {"n": LENGTHS, "x": torch.ones(4, 5, 3), "tokens": LENGTHS.sum()}
    return slots.loss(batch, noise, None)


def added(batch, noise, progress):
    return Loss((batch["x"] + noise["u"]).sum(), len(batch["n"]))


def cut(batch, noise, progress):
    return Loss((batch["x"] + noise["u"][:, : batch["x"].shape[1]]).sum(), len(batch["n"]))


def broken(batch, noise, progress):
    raise RuntimeError("mine")


def counting(batch, noise, progress):
    return Loss(batch["x"].sum(), batch["tokens"])


def test_noise_of_the_padded_batch_is_named():
    message = r"bucketing: Net\.noise: its shape \[4, 5, 3\] is that of the padded batch, .* \[2, 2, 3\]; cut it"
    with pytest.raises(RunnerError, match=message):
        bucketed(added, {"u": torch.zeros(4, 5, 3)})


def test_noise_that_the_loss_cuts_is_accepted():
    assert bucketed(cut, {"u": torch.zeros(4, 5, 3)}).count == 4


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="mine"):
        bucketed(broken, {"u": torch.zeros(4)})


def test_a_count_of_the_entire_batch_is_refused():
    with pytest.raises(RunnerError, match=r"bucketing: .*the count of 'loss' is 'tokens' of the entire batch"):
        bucketed(counting, {})
