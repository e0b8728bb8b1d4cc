import types

import pytest
from builders import works
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Probe
from runner.plugin.tuning import Tuning
from runner.plugins.stages.batch_autotune import BatchAutotuneConfig
from runner.system.errors import UsageError


class Machine:
    """Throughput rises with the batch size to a saturation point; memory ends somewhere."""

    def __init__(self, batch_size, saturation, memory):
        self.batch_size = batch_size
        self.saturation, self.memory = saturation, memory
        self.notes, self.probed = [], []
        self.choices = Tuning({}).of("batch_autotune")

    def probe(self, batch_size):
        self.probed.append(batch_size)
        if batch_size > self.memory:
            return None
        return Probe(1e6 * batch_size / (batch_size + self.saturation), batch_size, self.memory)

    def note(self, text):
        self.notes.append(text)


def prepared(machine, **settings):
    works(BatchAutotuneConfig(**settings)).prepare(machine)
    return machine


@given(st.integers(1, 512), st.integers(1, 4096), st.integers(700, 10_000))
def test_the_choice_keeps_headroom_and_is_never_slower(start, saturation, memory):
    machine = prepared(Machine(start, saturation, memory), headroom=0.25)
    assert machine.batch_size >= start
    assert machine.batch_size == start or machine.batch_size <= 0.75 * memory
    assert machine.batch_size <= 4096
    assert len(machine.probed) == len(set(machine.probed))


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="a batch of 512 does not leave 20% of the memory free"):
        prepared(Machine(512, saturation=100, memory=600))


def test_growth_is_found_and_reported():
    machine = prepared(Machine(64, saturation=1000, memory=10**6))
    assert machine.batch_size > 512
    assert f"64 -> {machine.batch_size}" in machine.notes[0]
    assert f"{64 / machine.batch_size:.3g} times the updates" in machine.notes[0]


def test_a_batch_that_is_best_already_stays():
    machine = prepared(Machine(128, saturation=1, memory=10**6))
    assert machine.batch_size == 128
    assert machine.notes == ["batch size 128 is the best found"]


def test_memory_bounds_the_search():
    machine = prepared(Machine(64, saturation=10**6, memory=600))
    assert machine.batch_size <= 0.8 * 600
    assert machine.batch_size > 256  # bisection goes beyond the doubling


@pytest.mark.parametrize(("unit", "searches"), [("updates", False), ("epochs", True), ("samples", True)])
def test_a_training_that_is_counted_in_updates_has_nothing_to_win(unit, searches):
    assert (BatchAutotuneConfig().inactive(types.SimpleNamespace(unit=unit)) is None) == searches
