"""A loss that counts the entire batch in each of its parts is refused."""

from types import SimpleNamespace

import pytest
import torch

from runner.api import BatchLayout, Loss, Mean, PartCounts, RunnerError
from runner.system.tensor_trees import inferred_layout

LENGTHS = torch.tensor([2, 5, 3, 1, 4, 6, 2, 3])


class Net:
    def loss(self, batch, noise, progress):
        """Is named in messages."""


class Several:
    """Has no method for one loss."""


def batch_of(count):
    lengths = LENGTHS[:count]
    tokens = lengths.sum()
    return {"n": lengths, "tokens": tokens, "number": int(tokens), "inner": {"t": tokens}, "width": torch.tensor(4)}


def double(count):
    """A batch of one sample, repeated."""
    lengths = LENGTHS[:1].repeat(count)
    tokens = lengths.sum()
    return {"n": lengths, "tokens": tokens, "number": int(tokens), "inner": {"t": tokens}, "width": torch.tensor(4)}


def checked(count, parts=(4, 4), also=None, learner=Net):
    layout = inferred_layout(double(1), double)
    batch = batch_of(sum(parts))
    counts = PartCounts("gradient_accumulation", learner(), SimpleNamespace(layout=layout))
    losses = []
    start = 0
    for size in parts:
        part = layout.take(batch, slice(start, start + size))
        metrics = {} if also is None else {"accuracy": Mean(torch.tensor(1.0), also(part))}
        losses.append(Loss(torch.tensor(1.0), count(part), metrics))
        start += size
    counts.check(batch, parts, losses)
    # Later batches are not looked at.
    counts.check(batch, parts, losses)


WRONG = {
    "itself": lambda part: part["tokens"],
    "its float": lambda part: part["tokens"].float(),
    "its item": lambda part: part["tokens"].item(),
    "its minimum": lambda part: part["tokens"].clamp(min=1),
    "a number": lambda part: part["number"],
    "inside": lambda part: part["inner"]["t"],
    "a constant": lambda part: part["width"],
}
RIGHT = {
    "samples": lambda part: len(part["n"]),
    "tokens": lambda part: part["n"].sum(),
    "as many samples as a constant": lambda part: torch.tensor(len(part["n"])),
}


@pytest.mark.parametrize("parts", [(4, 4), (3, 3, 2)])
@pytest.mark.parametrize("name", WRONG)
def test_a_count_of_the_entire_batch_is_refused(name, parts):
    with pytest.raises(RunnerError, match=r"gradient_accumulation: .*the count of 'loss' is '.*' of the entire batch"):
        checked(WRONG[name], parts)


@pytest.mark.parametrize("parts", [(4, 4), (3, 3, 2), (8,)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_count_of_the_part_is_accepted(name, parts):
    checked(RIGHT[name], parts)


@pytest.mark.parametrize(("learner", "name"), [(Net, r"Net\.loss in .*test_part_counts\.py:\d+"), (Several, "Several")])
def test_the_learner_is_named(learner, name):
    with pytest.raises(RunnerError, match=f"gradient_accumulation: {name}: the count"):
        checked(WRONG["itself"], learner=learner)


def test_a_batch_that_is_one_part_has_the_counts_of_the_batch():
    checked(WRONG["itself"], (8,))


def test_counts_of_metrics_are_checked_too():
    with pytest.raises(RunnerError, match="the count of 'accuracy' is 'tokens' of the entire batch"):
        checked(RIGHT["tokens"], also=WRONG["itself"])


def test_numbers_that_grow_with_the_samples_are_inferred():
    assert inferred_layout(double(1), double).totals == {"tokens", "number", "inner.t"}
    assert BatchLayout().totals == frozenset()
