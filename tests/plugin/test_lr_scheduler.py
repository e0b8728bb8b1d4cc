"""Learning rates as a function of how far a training is; torch's own schedules say the same where they have one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runner.plugin.lr_scheduler import (
    SCHEDULES,
    WARMUP_START,
    ConstantConfig,
    CosineConfig,
    CosineRestartsConfig,
    InverseSqrtConfig,
    LinearConfig,
    OneCycleConfig,
    PlateauConfig,
    PolynomialConfig,
    StepConfig,
)
from runner.plugin.schedule_kinds import SCHEDULE_KINDS

share = st.floats(0, 1)
warmup = st.floats(0, 0.9).filter(lambda share: share == 0 or share > 1e-3)
inside = st.floats(0.01, 0.99)
positive = st.floats(1e-3, 1)
SMOOTH = {
    "constant": st.builds(ConstantConfig, warmup=warmup),
    "linear": st.builds(LinearConfig, warmup=warmup, floor=share),
    "cosine": st.builds(CosineConfig, warmup=warmup, floor=share),
    "one_cycle": st.builds(OneCycleConfig, warmup=warmup, peak=inside, start=positive, floor=share),
    "polynomial": st.builds(PolynomialConfig, warmup=warmup, power=st.floats(1, 10), floor=share),
    "inverse_sqrt": st.builds(InverseSqrtConfig, warmup=st.floats(1e-3, 0.9)),
    "plateau": st.builds(PlateauConfig, warmup=warmup),
}
STEPS = st.builds(StepConfig, warmup=warmup, every=positive, gamma=positive)
growth = st.floats(1, 3)
RESTARTS = st.builds(CosineRestartsConfig, warmup=warmup, cycles=st.integers(1, 8), growth=growth, floor=share)
ALL = {**SMOOTH, "step": STEPS, "cosine_restarts": RESTARTS}
assert ALL.keys() == SCHEDULES.keys()
every_kind = pytest.mark.parametrize("kind", ALL)
ROUNDING = 1e-9


@every_kind
@given(data=st.data(), at=share)
def test_the_factor_is_a_share_of_the_learning_rate(kind, data, at):
    assert 0 <= data.draw(ALL[kind]).multiplier(at) <= 1 + ROUNDING


@every_kind
@given(data=st.data(), at=st.lists(share, min_size=2, max_size=2).map(sorted))
def test_a_warm_up_rises(kind, data, at):
    schedule = data.draw(ALL[kind])
    low, high = (each * schedule.warmup * (1 - ROUNDING) for each in at)
    assert schedule.multiplier(low) <= schedule.multiplier(high)
    if schedule.warmup:
        assert schedule.multiplier(0.0) == WARMUP_START


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "one_cycle"])
@given(data=st.data())
def test_after_the_warm_up_all_of_the_learning_rate_is_reached(kind, data):
    schedule = data.draw(ALL[kind])
    assert schedule.multiplier(schedule.warmup) == 1


@pytest.mark.parametrize("kind", ["linear", "cosine", "step", "polynomial", "inverse_sqrt"])
@given(data=st.data(), at=st.lists(share, min_size=2, max_size=2).map(sorted))
def test_a_decay_never_rises(kind, data, at):
    schedule = data.draw(ALL[kind])
    early, late = (schedule.warmup + each * (1 - schedule.warmup) for each in at)
    assert schedule.multiplier(late) <= schedule.multiplier(early) + ROUNDING


@pytest.mark.parametrize("kind", ["linear", "cosine", "one_cycle", "polynomial", "cosine_restarts"])
@given(data=st.data())
def test_a_decay_ends_at_its_floor(kind, data):
    schedule = data.draw(ALL[kind])
    assert schedule.multiplier(1.0) == pytest.approx(schedule.floor, abs=ROUNDING)


@pytest.mark.parametrize("kind", SMOOTH)
@given(data=st.data(), at=share)
def test_a_schedule_without_steps_does_not_jump_after_its_warm_up(kind, data, at):
    schedule = data.draw(SMOOTH[kind])
    near = 1e-9
    here = schedule.warmup + at * (1 - schedule.warmup) * (1 - near)
    moved = schedule.multiplier(min(1.0, here + near * (1 - schedule.warmup))) - schedule.multiplier(here)
    assert abs(moved) < 1e-6  # a peak at 1 % is the steepest of them


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "plateau"])
@given(data=st.data())
def test_a_warm_up_meets_what_follows(kind, data):
    schedule = data.draw(SMOOTH[kind])
    if schedule.warmup:
        assert schedule.multiplier(schedule.warmup * (1 - 1e-9)) == pytest.approx(1, abs=1e-6)


@given(st.floats(0, 0.9), inside, positive, share)
def test_one_cycle_is_highest_at_its_peak(warmup, peak, start, floor):
    schedule = OneCycleConfig(warmup=warmup, peak=peak, start=start, floor=floor)
    assert schedule.multiplier(warmup + peak * (1 - warmup)) == pytest.approx(1, abs=1e-6)
    assert schedule.multiplier(warmup) == pytest.approx(start)


@given(positive, positive, st.integers(0, 20))
def test_each_step_multiplies_by_gamma(every, gamma, number):
    schedule = StepConfig(every=every, gamma=gamma)
    if (number + 0.5) * every < 1:
        assert schedule.multiplier((number + 0.5) * every) == pytest.approx(gamma**number)


@pytest.mark.parametrize("parts", [3, 7, 10])
def test_a_sum_of_shares_reaches_its_step_although_it_is_rounded(parts):
    schedule = StepConfig(every=1 / parts, gamma=0.5)
    assert schedule.multiplier(sum([1 / parts] * (parts - 1))) == 0.5 ** (parts - 1)


@given(warmup, st.integers(1, 8), growth, share)
def test_every_cycle_begins_with_the_complete_learning_rate_and_ends_at_the_floor(warmup, cycles, growth, floor):
    schedule = CosineRestartsConfig(warmup=warmup, cycles=cycles, growth=growth, floor=floor)
    lengths = [growth**number for number in range(cycles)]
    for number in range(cycles):
        start = warmup + (1 - warmup) * sum(lengths[:number]) / sum(lengths)
        assert schedule.multiplier(start) == pytest.approx(1, abs=1e-6)
        earlier_length = (1 - warmup) * lengths[number - 1] / sum(lengths)
        # Shorter cycles are lost in the rounding that the schedule allows for.
        if number and earlier_length > 1e-5:
            assert schedule.multiplier(start - 1e-3 * earlier_length) == pytest.approx(floor, abs=1e-4)


@given(st.floats(1e-3, 0.2))
def test_the_inverse_square_root_halves_after_four_warm_ups(warmup):
    assert InverseSqrtConfig(warmup=warmup).multiplier(4 * warmup) == pytest.approx(0.5)


def test_the_inverse_square_root_needs_a_warm_up():
    with pytest.raises(ValidationError, match="greater than 0"):
        InverseSqrtConfig(warmup=0)


LENGTH = 40


def theirs(make):
    """The factors of a schedule of torch, update by update."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer)
    factors = []
    for _ in range(LENGTH):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return factors


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (
            LinearConfig(floor=0.1),
            lambda of: torch.optim.lr_scheduler.LinearLR(of, start_factor=1.0, end_factor=0.1, total_iters=LENGTH),
        ),
        (CosineConfig(floor=0.1), lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, LENGTH, eta_min=0.1)),
        (StepConfig(every=0.25, gamma=0.5), lambda of: torch.optim.lr_scheduler.StepLR(of, LENGTH // 4, gamma=0.5)),
        (
            PolynomialConfig(power=2.5),
            lambda of: torch.optim.lr_scheduler.PolynomialLR(of, total_iters=LENGTH, power=2.5),
        ),
        (
            CosineRestartsConfig(cycles=2, growth=3.0, floor=0.1),
            lambda of: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(of, LENGTH // 4, T_mult=3, eta_min=0.1),
        ),
        (
            CosineRestartsConfig(cycles=4, growth=1.0),
            lambda of: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(of, LENGTH // 4),
        ),
        (ConstantConfig(), lambda of: torch.optim.lr_scheduler.ConstantLR(of, factor=1.0)),
    ],
)
def test_torch_says_the_same(schedule, make):
    assert [schedule.multiplier(i / LENGTH) for i in range(LENGTH)] == pytest.approx(theirs(make))


def test_one_cycle_is_torchs_with_its_defaults():
    def make(optimizer):  # its last update is at the floor, so that a training of one update less is the same length
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=LENGTH + 1, cycle_momentum=False)

    # torch puts the peak at 0.3 of the steps less one.
    schedule = OneCycleConfig(peak=(0.3 * (LENGTH + 1) - 1) / LENGTH)
    assert [schedule.multiplier(i / LENGTH) for i in range(LENGTH)] == pytest.approx(theirs(make), abs=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_a_kind_is_known_by_its_name(kind):
    schedule = SCHEDULES[kind]()
    assert schedule.kind == kind
    assert 0 <= schedule.multiplier(0.5) <= 1


@pytest.mark.parametrize("values", [{"warmup": 1.0}, {"warmup": -0.1}, {"floor": 1.5}, {"gamma": 0.5}])
def test_what_is_no_schedule_is_refused(values):
    with pytest.raises(ValidationError):
        CosineConfig(**values)


def test_a_shell_offers_all_kinds():
    assert sorted(SCHEDULES) == list(SCHEDULE_KINDS)
