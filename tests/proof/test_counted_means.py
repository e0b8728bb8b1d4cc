"""Means of integers that parts of a batch count more often."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Mean
from runner.proof.difference import differing
from runner.proof.isolation import STEP, Location, copy_outputs
from runner.verify.likeness import unlike

COUNTS = [int, float, torch.tensor]
SUMS = [int, torch.tensor, lambda number: torch.tensor(number, dtype=torch.int32)]


def frame_of(total, count):
    return copy_outputs({"metric": Mean(total, count)})


def has_same_mean(baseline, changed):
    return not list(differing(baseline, changed)) and unlike(baseline, changed, form=False) is None


@given(st.integers(-9, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from(SUMS), st.sampled_from(COUNTS))
def test_a_mean_that_is_counted_more_often_is_the_same(total, count, times, as_sum, as_count):
    baseline = frame_of(as_sum(total), as_count(count))
    changed = frame_of(as_sum(times * total), as_count(times * count))
    assert has_same_mean(baseline, changed)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40))
def test_other_means_differ(total, count, times, error):
    assert not has_same_mean(frame_of(total, count), frame_of(times * total + error + 1, times * count))


@pytest.mark.parametrize(("total", "count"), [(6, 6), (4, 4), (0, 0), (12, 12), (8, 9)])
def test_samples_that_are_left_out_are_counted(total, count):
    """Although all answers are right, so that the mean is the same."""
    assert not has_same_mean(frame_of(torch.tensor(8), 8), frame_of(torch.tensor(total), count))


@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_only_outputs_are_means(kind):
    frames = [
        {
            Location(STEP, kind, "metric.sum"): torch.tensor(times),
            Location(STEP, kind, "metric.count"): torch.tensor(times),
        }
        for times in (1, 2)
    ]
    assert list(differing(*frames))


def test_sums_that_are_not_integers_are_no_means():
    frames = [copy_outputs({"sum": float(times), "count": times}) for times in (1, 2)]
    assert list(differing(*frames))
