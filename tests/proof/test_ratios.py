import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.proof.ratios import Effect, Ratio, effect, of_processes, of_rounds, ratio

seconds = st.floats(1e-4, 1e2)
pairs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=30)


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
    intervals = [of_rounds(sample.tolist()) for sample in samples]
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
        (Ratio(1.1, 0.9, 1.3, 9), Ratio(1, 0.98, 1.02, 9), Effect.UNCLEAR),
        (Ratio(1.1, 1.05, 1.2, 9), Ratio(1, 0.98, 1.15, 9), Effect.UNCLEAR),
        (Ratio(0.9, 0.85, 0.95, 9), Ratio(1, 0.85, 1.01, 9), Effect.UNCLEAR),
        (Ratio(1.1, 1.05, 1.2, 4), Ratio(1, 0.98, 1.02, 4), Effect.UNCLEAR),
        (Ratio(1.1, 1.05, 1.2, 9, 3), Ratio(1, 0.98, 1.15, 9, 3), Effect.FASTER),
        (Ratio(1.1, 1.05, 1.2, 9, 3), Ratio(0.9, 0.8, 1.02, 9, 3), Effect.UNCLEAR),
    ],
)
def test_an_effect_that_the_noise_reaches_is_not_claimed(measured, a_a, said):
    assert effect(measured, a_a) is said


def test_of_processes_is_students_interval_of_logarithms():
    found = of_processes([2.0, 4.0, 8.0], 30)
    assert found.value == pytest.approx(4.0)
    reach = 4.302653 * math.log(2) / math.sqrt(3)  # the table's quantile for 2 degrees of freedom
    assert math.log(found.high / 4) == pytest.approx(reach)
    assert math.log(4 / found.low) == pytest.approx(reach)
    assert (found.rounds, found.processes) == (30, 3)


@pytest.mark.parametrize("processes", [2, 3, 5, 10])
def test_luck_of_a_process_is_no_effect_however_few_there_are(processes):
    draw = torch.Generator().manual_seed(0)
    trials = (torch.randn(2000, processes, generator=draw, dtype=torch.float64) * 0.03).exp().tolist()
    wrong = sum(not (found := of_processes(trial, 20)).low <= 1 <= found.high for trial in trials) / len(trials)
    assert 0.035 <= wrong <= 0.065


def test_luck_of_a_process_is_an_effect_to_an_interval_over_its_rounds():
    draw = torch.Generator().manual_seed(0)
    luck = torch.randn(100, 1, generator=draw, dtype=torch.float64) * 0.03
    trials = (luck + torch.randn(100, 20, generator=draw, dtype=torch.float64) * 0.01).exp().tolist()
    assert sum(not (found := of_rounds(trial)).low <= 1 <= found.high for trial in trials) > 60


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=9))
def test_a_ratio_of_processes_and_its_inverse_say_the_same(ratios):
    there, back = of_processes(ratios, 9), of_processes([1 / each for each in ratios], 9)
    assert (there.value, there.low, there.high) == pytest.approx((1 / back.value, 1 / back.high, 1 / back.low))
