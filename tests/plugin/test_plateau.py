"""A plateau reduces learning rates as torch's ReduceLROnPlateau does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.contract import Objective
from runner.plugin.lr_scheduler import WARMUP_START, PlateauConfig
from runner.plugin.plateau import Plateau
from runner.plugin.progress import Progress
from runner.system.errors import RunnerError
from runner.verify.checks.schedules import POINTS, find_kinks, spread_points

LOSS = Objective("loss", "minimize")
VALUES = st.lists(st.one_of(st.floats(-5, 5), st.sampled_from([0.0, 1.0, math.nan])), min_size=1, max_size=40)
SETTINGS = st.fixed_dictionaries(
    {
        "factor": st.floats(0.05, 0.95),
        "patience": st.integers(0, 4),
        "min_delta": st.floats(0, 2),
        "cooldown": st.integers(0, 3),
        "min_lr": st.sampled_from([0.0, 1e-9, 1e-3, 0.5]),
        "direction": st.sampled_from(["minimize", "maximize"]),
    }
)
RATES = st.lists(st.floats(1e-6, 1), min_size=1, max_size=3)


def observe(plateau, value, updates):
    plateau.observe({"loss": value}, Progress("updates", 100, updates=updates))


@given(VALUES, SETTINGS, RATES)
def test_rates_are_those_of_torch(values, settings, rates):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])
    expected = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        settings["direction"][:3],
        settings["factor"],
        settings["patience"],
        threshold=settings["min_delta"],
        threshold_mode="abs",
        cooldown=settings["cooldown"],
        min_lr=settings["min_lr"],
    )
    plateau = Plateau(PlateauConfig(metric="eval/loss", **settings), None)
    for number, value in enumerate(values, 1):
        expected.step(value)
        observe(plateau, value, number)
        assert [plateau.rate(rate) for rate in rates] == [group["lr"] for group in optimizer.param_groups]


@given(VALUES, SETTINGS, RATES, st.data())
def test_an_interruption_changes_nothing(values, settings, rates, data):
    config = PlateauConfig(metric="eval/loss", **settings)
    expected = Plateau(config, None)
    plateau = Plateau(config, None)
    cut = data.draw(st.integers(0, len(values)))
    for number, value in enumerate(values, 1):
        if number - 1 == cut:
            state = plateau.state_dict()
            plateau = Plateau(config, None)
            plateau.load_state_dict(state)
        observe(expected, value, number)
        observe(plateau, value, number)
        assert [plateau.rate(rate) for rate in rates] == [expected.rate(rate) for rate in rates]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@given(values=VALUES, number=st.integers(0, 40), bad=st.sampled_from([math.inf, -math.inf]))
def test_an_infinite_value_is_no_improvement_as_nan_is_none(direction, values, number, bad):
    config = PlateauConfig(metric="eval/loss", patience=1, factor=0.5, direction=direction)
    reductions = []
    for inserted in (bad, math.nan):
        plateau = Plateau(config, None)
        for updates, value in enumerate([*values[:number], inserted, *values[number:]], 1):
            observe(plateau, value, updates)
        reductions.append(plateau.reductions)
    assert reductions[0] == reductions[1]


def test_evaluations_before_the_end_of_the_warm_up_do_not_count():
    plateau = Plateau(PlateauConfig(patience=0, warmup=0.1), LOSS)
    for updates in (0, 2, 5, 9):
        observe(plateau, 1.0, updates)
    assert plateau.reductions == 0
    observe(plateau, 1.0, 10)
    observe(plateau, 1.0, 20)
    assert plateau.reductions == 1


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_as_a_function_of_the_progress_it_is_a_warm_up(warmup):
    schedule = PlateauConfig(warmup=warmup)
    for fraction in spread_points(POINTS):
        expected = 1.0 if fraction >= warmup else WARMUP_START + (1 - WARMUP_START) * fraction / warmup
        assert schedule.multiplier(fraction) == expected
    assert find_kinks(schedule) == ([warmup] if warmup else [])


def test_a_metric_that_is_not_measured_is_an_error_with_those_that_are():
    plateau = Plateau(PlateauConfig(metric="eval/los", direction="minimize"), LOSS)
    with pytest.raises(RunnerError) as caught:
        observe(plateau, 1.0, 1)
    assert str(caught.value) == "lr_scheduler.metric: the evaluation has no 'eval/los'; it has eval/loss"


@pytest.mark.parametrize(
    ("settings", "objective", "watched"),
    [
        ({}, LOSS, ("loss", "minimize")),
        ({"direction": "maximize"}, LOSS, ("loss", "maximize")),
        ({"metric": "eval/loss"}, LOSS, ("loss", "minimize")),
        ({"metric": "eval/words", "direction": "maximize"}, None, ("words", "maximize")),
        ({"metric": "eval/words"}, LOSS, None),
        ({}, None, None),
    ],
)
def test_the_objective_is_the_default(settings, objective, watched):
    config = PlateauConfig(**settings)
    assert config.watched(objective) == watched
    assert bool(list(config.contradictions(objective))) == (watched is None)
