"""Races between steps: a thread copies batches later than it is asked to."""

from functools import partial

import pytest
import torch
from late_device import LateQueues
from torch import nn

from runner.proof import Exact, Outcome, Subject, verify, work_in_flight
from runner.proof.checks import steps_in_flight as check_module
from runner.proof.work_in_flight import compare_in_flight

ROWS = 4
BATCHES = [torch.full((ROWS, 3), float(number)) for number in range(1, 13)]


@pytest.fixture
def queues(monkeypatch):
    late = LateQueues()
    monkeypatch.setattr(check_module, "device_queues", lambda: late)
    return late


def training(make_load=lambda: lambda batch: batch):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    load = make_load()

    def step(batch):
        loss = model(load(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Subject(step, {"model": model, "optimizer": optimizer})


def copies_to_one_place(queues, waits_for_copy=True):
    """The copy is used at once."""
    place = torch.zeros(ROWS, 3)

    def load(batch):
        copied = queues.stream.submit(lambda: place.copy_(batch))
        if waits_for_copy:
            copied.wait()
        return place.clone()

    return load


def copies_from_one_buffer(queues, waits_for_buffer=True):
    """The host writes a buffer, which the thread copies to a new place, while the host prepares the next batch."""
    buffer = torch.zeros(ROWS, 3)
    copies = []

    def load(batch):
        places = [torch.zeros(ROWS, 3) for _ in range(2)]
        for place, factor in zip(places, (1.0, 2.0), strict=True):
            buffer.copy_(factor * batch)
            copies.append(queues.stream.submit(partial(place.copy_, buffer)))
            if waits_for_buffer:
                copies[-1].wait()
        copies[-1].wait()
        return places[0]

    return load


@pytest.mark.parametrize("load", [copies_to_one_place, copies_from_one_buffer])
def test_a_step_that_waits_passes(queues, load):
    verdict = verify(training, lambda: training(lambda: load(queues)), BATCHES, Exact())
    assert verdict, verdict.summary


@pytest.mark.parametrize(
    "load",
    [partial(copies_to_one_place, waits_for_copy=False), partial(copies_from_one_buffer, waits_for_buffer=False)],
)
def test_a_race_fails(queues, load):
    verdict = compare_in_flight(lambda: training(lambda: load(queues)), BATCHES, WaitingQueues(queues), "Exact", 0)
    assert verdict.outcome is Outcome.FAIL, verdict.summary
    assert "depends on when the device computes it" in verdict.summary
    assert verdict.evidence["race"].startswith("its side streams are")


class WaitingQueues(LateQueues):
    """The same queues, whose work is done at once unless they are delayed, as that of a fast device."""

    def __init__(self, queues):
        self.stream = queues.stream
        submit, self._is_late = self.stream.submit, False

        def submit_fast(work):
            done = submit(work)
            if not self._is_late:
                done.wait()
            return done

        self.stream.submit = submit_fast

    def delay_sides(self, seconds):
        self._is_late = True
        super().delay_sides(seconds)

    def synchronize(self):
        super().synchronize()
        self._is_late = False


def test_a_change_that_is_not_repeatable_is_inconclusive(queues):
    numbers = iter(range(10_000))
    verdict = compare_in_flight(
        lambda: training(lambda: lambda batch: batch + next(numbers)), BATCHES, queues, "Exact", 0
    )
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not the same twice" in verdict.summary


def test_a_delay_is_longer_than_steps_and_limited(queues, monkeypatch):
    monkeypatch.setattr(work_in_flight, "MOST_SECONDS", 0.03)
    verdict = compare_in_flight(training, BATCHES, queues, "Exact", 0)
    assert 0.02 <= verdict.evidence["delay_s"] <= 0.03


def test_nothing_is_in_flight_without_a_device():
    assert check_module.device_queues() is None or torch.cuda.is_available()
