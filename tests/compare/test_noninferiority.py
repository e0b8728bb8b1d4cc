import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.compare.noninferiority import (
    Effect,
    NonInferiority,
    Ratio,
    design,
    effect,
    of_ratios,
    ratio,
)
from runner.compare.verdict import Outcome

seconds = st.floats(1e-4, 1e2)
pairs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=30)
TRIALS = 1500


@given(pairs)
def test_the_interval_holds_the_median_and_the_median_is_of_paired_ratios(times):
    baseline, changed = zip(*times, strict=True)
    found = ratio(baseline, changed)
    assert found.low <= found.value * (1 + 1e-12)
    assert found.value <= found.high * (1 + 1e-12)
    ordered = sorted(math.log(a / b) for a, b in times)
    middle = (ordered[(len(times) - 1) // 2] + ordered[len(times) // 2]) / 2
    assert found.value == pytest.approx(math.exp(middle))
    assert found.rounds == len(times)
    assert found == ratio(baseline, changed)


@given(pairs)
def test_the_inverse_change_has_the_inverse_ratio(times):
    baseline, changed = zip(*times, strict=True)
    there, back = ratio(baseline, changed), ratio(changed, baseline)
    assert there.value == pytest.approx(1 / back.value)
    assert there.spread == pytest.approx(back.spread, rel=0.5)


@given(pairs, st.floats(0.5, 2))
def test_a_slower_machine_changes_no_ratio(times, factor):
    baseline, changed = zip(*times, strict=True)
    slowed = ratio([factor * t for t in baseline], [factor * t for t in changed])
    assert slowed.value == pytest.approx(ratio(baseline, changed).value)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draw = torch.Generator().manual_seed(0)
    samples = (torch.randn(400, 15, generator=draw, dtype=torch.float64) * 0.1).exp() * 2
    intervals = [of_ratios(sample.tolist()) for sample in samples]
    covered = sum(found.low <= 2 <= found.high for found in intervals) / len(intervals)
    assert 0.90 <= covered <= 0.99


@pytest.mark.parametrize("times", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [math.nan]), ([1.0], [-1.0])])
def test_what_are_no_pairs_of_times_is_refused(times):
    with pytest.raises(ValueError, match=r"pairs|positive"):
        ratio(*times)


@pytest.mark.parametrize(
    ("measured", "a_a", "said"),
    [
        (Ratio(1.5, 1.4, 1.6, 9), Ratio(1, 0.98, 1.02, 9), Effect.FASTER),
        (Ratio(0.7, 0.6, 0.8, 9), Ratio(1, 0.98, 1.02, 9), Effect.SLOWER),
        (Ratio(1.1, 0.9, 1.3, 9), Ratio(1, 0.98, 1.02, 9), Effect.INCONCLUSIVE),
        (Ratio(1.1, 1.05, 1.2, 9), Ratio(1, 0.98, 1.15, 9), Effect.INCONCLUSIVE),
        (Ratio(0.9, 0.85, 0.95, 9), Ratio(1, 0.85, 1.01, 9), Effect.INCONCLUSIVE),
    ],
)
def test_an_effect_that_the_noise_reaches_is_not_claimed(measured, a_a, said):
    assert effect(measured, a_a) is said


def outcomes(difference, deviation, margin=1.0, trials=TRIALS, **settings):
    """How often simulated experiments end how; the difference is that of the change, upwards better."""
    draw = random.Random(1)
    ends = dict.fromkeys(Outcome, 0)
    used = 0
    for _ in range(trials):
        test = NonInferiority(margin, **settings)
        while test.decision() is None and len(test) < test.most:
            seed = draw.gauss(100, 5)  # what both of a pair share
            test.add(seed, seed + draw.gauss(difference, deviation))
        ends[test.conclude()] += 1
        used += len(test)
    return {outcome: count / trials for outcome, count in ends.items()} | {"pairs": used / trials}


@pytest.mark.parametrize("settings", [{}, {"most": 8}, {"looks": (3, 9), "most": 15}, {"alpha": 0.1, "most": 6}])
@pytest.mark.parametrize("deviation", [0.1, 1.0, 10.0])
def test_at_the_margin_it_passes_no_more_often_than_alpha(settings, deviation):
    alpha = settings.get("alpha", 0.05)
    error = 3 * math.sqrt(alpha * (1 - alpha) / TRIALS)
    ends = outcomes(-1.0, deviation, **settings)
    assert ends[Outcome.PASS] <= alpha + error
    assert ends[Outcome.FAIL] <= alpha + error  # at the margin, a failure would be as wrong


@pytest.mark.parametrize("settings", [{}, {"most": 8}, {"power": 0.9}])
def test_a_change_that_loses_nothing_passes_with_the_stated_power(settings):
    power = settings.get("power", 0.8)
    allowed = NonInferiority(1.0, **settings).design.allowed_deviation
    error = 3 * math.sqrt(power * (1 - power) / TRIALS)
    assert outcomes(0.0, allowed, **settings)[Outcome.PASS] >= power - error
    assert outcomes(0.0, 3 * allowed, **settings)[Outcome.PASS] < power  # and that is not said of noisier pairs


def test_what_is_clear_is_said_early_and_what_is_bad_fails():
    good, bad = outcomes(0.0, 0.1, trials=100), outcomes(-3.0, 0.1, trials=100)
    assert good[Outcome.PASS] == bad[Outcome.FAIL] == 1.0
    assert max(good["pairs"], bad["pairs"]) < 6


def test_too_few_pairs_are_no_pass():
    test = NonInferiority(1.0)
    for _ in range(2):
        test.add(1.0, 2.0)
    assert test.decision() is None
    assert test.conclude() is Outcome.INCONCLUSIVE


def test_equal_runs_pass_and_a_smaller_is_better_metric_turns_round():
    same, worse, better = (
        NonInferiority(0.05, relative=True),
        *(NonInferiority(0.5, larger_is_better=s) for s in (0, 1)),
    )
    for value in (10.0, 11.0, 12.0, 13.0):
        same.add(value, value)
        worse.add(value, value + 1 + value / 100)
        better.add(value, value + 1 + value / 100)
    assert (same.conclude(), worse.conclude(), better.conclude()) == (Outcome.PASS, Outcome.FAIL, Outcome.PASS)
    assert same.evidence()["margin"] == pytest.approx(0.05 * 11)
    assert "PASS after 3 of 20 pairs" in same.summary()


def test_after_a_decision_nothing_changes():
    test = NonInferiority(1.0)
    for value in (1.0, 1.1, 0.9, -50.0, -50.0, -50.0, -50.0):
        test.add(1.0, value)
    assert len(test) == 3
    assert test.conclude() is Outcome.PASS


def test_values_that_are_not_finite_and_plans_without_sense_are_refused():
    with pytest.raises(ValueError, match="finite"):
        NonInferiority(1.0).add(1.0, math.nan)
    for settings in (
        {"margin": 0},
        {"margin": 1, "alpha": 0.9},
        {"margin": 1, "most": 1},
        {"margin": 1, "looks": (6, 4)},
    ):
        with pytest.raises(ValueError, match=r"margin|looks"):
            NonInferiority(**settings)


def test_later_looks_ask_for_less_and_more_pairs_allow_more_noise():
    plan = design((4, 6, 8, 12, 16, 20), 0.05, 0.8)
    assert list(plan.bounds) == [4, 6, 8, 12, 16, 20]
    assert list(plan.bounds.values()) == sorted(plan.bounds.values(), reverse=True)
    assert plan.allowed_deviation > design((4, 6), 0.05, 0.8).allowed_deviation


@pytest.mark.parametrize("side", [1, -1])
def test_a_relative_margin_is_a_share_of_the_mean_and_not_of_the_sizes(side):
    baseline = [side * value for value in (11.0, -9.0)] * 10  # 1 or -1 in the mean, of size 10
    lossy, harmless = (NonInferiority(0.05, most=20, relative=True, looks=[20]) for _ in range(2))
    for value in baseline:
        lossy.add(value, value - 0.4)  # 40 % of the mean, 4 % of the size
        harmless.add(value, value + 0.6)
    assert lossy.conclude() is not Outcome.PASS
    assert lossy.evidence()["margin"] == pytest.approx(0.05)
    assert harmless.conclude() is Outcome.PASS
