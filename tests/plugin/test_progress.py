from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.progress import UNITS, Progress, Unit

counts = st.fixed_dictionaries({}, optional={unit: st.integers(0, 50) for unit in UNITS if unit != "epochs"})


def test_every_unit_is_counted():
    progress = Progress("updates", 1)
    assert get_args(Unit) == UNITS
    assert all(getattr(progress, unit) == 0 for unit in UNITS)


def test_an_epoch_is_complete_when_all_its_samples_were_learnt_from():
    progress = Progress("epochs", 2, epoch_samples=10)
    epochs, fractions = [], []
    for _ in range(5):
        progress.advance({"updates": 1, "samples": 4})
        epochs.append(progress.epochs)
        fractions.append(progress.fraction)
    assert epochs == [0, 0, 1, 1, 2]
    assert fractions == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_data_without_epochs_complete_none():
    progress = Progress("samples", 100)
    progress.advance({"samples": 100})
    assert progress.epochs == 0


@pytest.mark.parametrize("unit", UNITS)
@given(length=st.integers(1, 100), epoch=st.integers(1, 20), steps=st.lists(counts, max_size=20))
def test_a_training_goes_one_way_and_is_over_once_all_of_its_length_is_done(unit, length, epoch, steps):
    progress = Progress(unit, length, epoch_samples=epoch)
    before = 0.0
    for step in steps:
        progress.advance(step)
        assert before <= progress.fraction <= 1
        assert (progress.done >= length) == (progress.fraction == 1)
        before = progress.fraction


@pytest.mark.parametrize("unit", UNITS)
def test_the_length_alone_decides_how_far_it_is(unit):
    progress = Progress(unit, 4, epoch_samples=8)
    assert progress.fraction == 0
    assert progress.whole == (32 if unit == "epochs" else 4)
    progress.advance({"samples": 16} if unit == "epochs" else {unit: 2})
    assert progress.done == 2
    assert progress.fraction == 0.5


@given(st.lists(counts, max_size=5))
def test_a_resumed_training_is_as_far_as_it_was(steps):
    progress, resumed = Progress("tokens", 100, epoch_samples=7), Progress("tokens", 100, epoch_samples=7)
    for step in steps:
        progress.advance(step)
    resumed.load_state_dict(progress.state_dict())
    assert resumed == progress
    assert progress.state_dict().keys() == set(UNITS) - {"epochs"}  # they follow from the samples


def test_what_is_no_unit_is_counted_nowhere():
    with pytest.raises(AttributeError):
        Progress("updates", 1).advance({"epochs": 1})
