"""Means of what updates return, by name."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Mean, RunnerError
from runner.plugin.context import Slots
from runner.training import metrics
from runner.training.metrics import Activities, Means, split_time

CPU = torch.device("cpu")
FORMS = {
    "tensor": lambda value: torch.tensor(value, dtype=torch.float64),
    "float": float,
    "mean": lambda value: Mean(3 * value, 3),
    "mean of tensors": lambda value: Mean(torch.tensor(2 * value, dtype=torch.float64), torch.tensor(2)),
}
NUMBERS = st.floats(-1e6, 1e6)
UPDATES = st.lists(st.dictionaries(st.sampled_from("abc"), NUMBERS, min_size=1), min_size=1, max_size=8)
HOSTS = pytest.mark.parametrize("on_host", [True, False])
"""A GPU's way of adding up works on a CPU, too."""


@HOSTS
@pytest.mark.parametrize("form", FORMS)
@given(updates=UPDATES, data=st.data())
def test_a_mean_is_over_the_updates_that_returned_its_name_in_any_order(on_host, form, updates, data):
    means = Means("Learner", on_host)
    for update in updates:
        names = data.draw(st.permutations(list(update)))
        means.add({name: FORMS[form](update[name]) for name in names})
    found = means.take()
    expected = {name: [update[name] for update in updates if name in update] for name in "abc"}
    expected = {name: math.fsum(values) / len(values) for name, values in expected.items() if values}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert means.take() == {}


@HOSTS
def test_sums_and_counts_make_the_mean_over_all_items(on_host):
    means = Means("Learner", on_host)
    means.add({"loss": Mean(torch.tensor(6.0), 2), "rare": Mean(torch.tensor(0.0), torch.tensor(0))})
    means.add({"loss": Mean(torch.tensor(9.0), torch.tensor(8))})
    assert means.take() == {"loss": 1.5}  # and no mean of nothing


@HOSTS
@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (1, torch.bool),
        (200, torch.uint8),
        (60_000.0, torch.float16),
        (257.0, torch.bfloat16),
        (2**24 + 2.0, torch.float32),
    ],
)
def test_sums_and_counts_of_narrow_types_are_those_of_numbers(on_host, number, dtype):
    means = Means("Learner", on_host)
    value = torch.tensor(number, dtype=dtype)
    for _ in range(9):
        means.add({"twice": Mean(2 * float(value), value), "loss": Mean(value, torch.ones_like(value))})
    means.add({"twice": Mean(2.0, torch.tensor(1)), "loss": Mean(float(value), 1)})
    assert means.take() == pytest.approx({"twice": 2, "loss": float(value)}, rel=1e-12)


@HOSTS
def test_tensors_with_dimensions_are_feedback_and_not_logged(on_host):
    means = Means("Learner", on_host)
    means.add({"loss": torch.tensor(1.0), "td_error": torch.zeros(3)})
    assert means.take() == {"loss": 1.0}
    with pytest.raises(RunnerError, match=r"Learner\.update returns no scalar"):
        means.add({"td_error": torch.zeros(3)})


@HOSTS
@pytest.mark.parametrize(
    ("value", "described"),
    [
        (None, "NoneType"),
        (1, "int"),
        (True, "bool"),
        ("1.0", "str"),
        (np.float32(1), "float32"),
        (np.float64(1), "float64"),
        (np.zeros(()), "ndarray"),
        ({"inner": torch.tensor(1.0)}, "dict"),
        ([torch.tensor(1.0)], "list"),
        (Mean(None, 1), "Mean of NoneType and int"),
        (Mean(torch.zeros(2), 2), "Mean of Tensor and int"),
        (Mean(1.0, np.float64(2)), "Mean of float and float64"),
    ],
)
def test_what_cannot_be_added_up_is_refused_by_its_name(value, described, on_host):
    means = Means("Learner", on_host)
    with pytest.raises(RunnerError) as refused:
        means.add({"loss": torch.tensor(1.0), "odd": value})
    assert str(refused.value) == (
        f"Learner.update returned 'odd' as {described}; it should be a tensor, a float, or "
        "Mean(sum, count) of numbers or scalar tensors"
    )


def test_the_runners_own_names_are_refused():
    with pytest.raises(
        RunnerError, match=r"Learner\.update returned a metric with the name 'updates', which is reserved"
    ):
        Means("Learner", True).add({"updates": torch.tensor(1.0)})


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_that_is_not_finite_is_seen_at_once_on_a_cpu_and_when_asked_elsewhere(form, broken):
    for on_host in (True, False):
        means = Means("Learner", on_host)
        means.add({"loss": FORMS[form](1.0)})
        assert means.look()
        means.add({"loss": FORMS[form](broken)})
        assert means.finite != on_host
        assert not means.look()


@HOSTS
def test_what_was_added_up_is_a_value_of_its_own(on_host):
    means, loss = Means("Learner", on_host), torch.tensor(1.0)
    means.add({"loss": loss, "mean": Mean(loss, loss)})
    loss.fill_(100.0)  # a captured graph writes its output where it was
    means.add({"loss": torch.tensor(2.0), "mean": Mean(2.0, 1)})
    assert means.take() == {"loss": 1.5, "mean": 1.5}


@HOSTS
def test_sums_go_on_where_they_were_saved(on_host):
    means, resumed = Means("Learner", on_host), Means("Learner", on_host)
    means.add({"loss": torch.tensor(1.0), "tokens": Mean(torch.tensor(2.0), 4)})
    resumed.load_state_dict(means.state_dict(), CPU)
    for each in (means, resumed):
        each.add({"loss": torch.tensor(0.1)})
    assert resumed.take() == means.take()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"draw": 0.6, "next_batch": 0.6}, {"sample": 0.6, "transfer": 0.0, "update": 0.4}),
        ({"draw": 0.1, "next_batch": 0.3}, {"sample": 0.1, "transfer": 0.2, "update": 0.7}),
        ({"draw": 0.5, "next_batch": 0.5, "collect": 0.3}, {"collect": 0.3, "sample": 0.2, "update": 0.5}),
        ({"startup": 0.5, "evaluate": 0.2, "checkpoint": 0.1}, {"startup": 0.5, "evaluate": 0.2, "update": 0.2}),
        ({}, {"sample": 0.0, "update": 1.0}),
    ],
)
def test_all_of_the_time_is_split(seconds, expected):
    parts = split_time(1.0, defaultdict(float, seconds), ("collect",))
    assert {name: parts[name] for name in expected} == pytest.approx(expected)
    assert math.fsum(parts.values()) == pytest.approx(1.0)


class Device:
    """Does what it is given later, and a clock that knows of both."""

    type = "cuda"

    def __init__(self):
        self.now = self.queued = 0.0

    def launch(self, launching, computing):
        self.now += launching
        self.queued += computing

    def synchronize(self, *_):
        self.now += self.queued
        self.queued = 0.0


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(metrics, "perf_counter", lambda: device.now)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    return device


def test_work_that_is_launched_takes_until_it_is_done(device):
    activities, slots = Activities(device), Slots()
    slots.define(draw=lambda: device.launch(0.1, 0.0))
    slots.wrap("draw", activities.clock("draw"))
    for _ in range(10):
        slots.draw()
        device.launch(0.2, 0.7)  # an update
    with activities.measure("evaluate"):  # which has to wait for all of them first
        device.launch(0.5, 1.0)
    elapsed, seconds = activities.read()
    assert elapsed == pytest.approx(11.5)
    parts = split_time(elapsed, defaultdict(float, seconds | {"next_batch": seconds["draw"]}), ())
    assert parts["sample"] == pytest.approx(1.0)
    assert parts["evaluate"] == pytest.approx(1.5)
    assert parts["update"] == pytest.approx(9.0)  # of which 2 are spent launching
    assert activities.read() == (0.0, {})
