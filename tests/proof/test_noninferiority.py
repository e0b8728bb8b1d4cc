import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.proof.noninferiority import FEWEST_PAIRS, NonInferiority, design, hall
from runner.proof.verdict import Outcome

TRIALS = 600
EVIDENCE = Path(__file__).parents[2] / "experiments/instrument/noninferiority.json"


def test_the_published_error_rates_are_of_these_bounds_and_at_most_6_percent_in_seven_families():
    published = json.loads(EVIDENCE.read_text())["plans"]
    for name, most in (("8 pairs", 8), ("20 pairs", 20)):
        plan, found = published[name], NonInferiority(1.0, most).design
        assert {int(look): bound for look, bound in plan["passes"].items()} == pytest.approx(found.passes, rel=0.02)
        assert {int(look): bound for look, bound in plan["fails"].items()} == pytest.approx(found.fails, rel=0.02)
        for row in list(plan["families"].values())[:7]:
            assert max(row["false_pass"], row["false_fail"]) <= 0.06


def standard(draw):
    """Differences of deviation 1 and mean 0, from the families that a test has to stand."""
    side = draw.choice((-1, 1))
    return {
        "normal": draw.gauss(0, 1),
        "Student t": draw.gauss(0, 1) / math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(3))),
        "uniform": draw.uniform(-1, 1) * math.sqrt(3),
        "exponential to the loss": 1 - draw.expovariate(1),
        "exponential to the gain": draw.expovariate(1) - 1,
        "lognormal to the loss": (math.exp(0.5) - draw.lognormvariate(0, 1)) / math.sqrt(math.e * (math.e - 1)),
        "bimodal": side * 0.98 + 0.2 * draw.gauss(0, 1),
    }


FAMILIES = list(standard(random.Random(0)))


def outcomes(difference, deviation, margin=1.0, trials=TRIALS, family="normal", **settings):
    """How often simulated experiments end how; the difference is that of the change, upwards better."""
    draw = random.Random(1)
    ends = dict.fromkeys(Outcome, 0)
    used = 0
    for _ in range(trials):
        test = NonInferiority(margin, **settings)
        while test.decision() is None and len(test) < test.most:
            seed = draw.gauss(100, 5)  # what both of a pair share
            test.add(seed, seed + difference + deviation * standard(draw)[family])
        ends[test.conclude()] += 1
        used += len(test)
    return {outcome: count / trials for outcome, count in ends.items()} | {"pairs": used / trials}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", [{}, {"most": 8}, {"alpha": 0.1, "most": 9, "looks": (3, 9)}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mean_just_at_the_margin_passes_no_more_often_than_alpha(settings, family):
    alpha = settings.get("alpha", 0.05)
    error = 3 * math.sqrt(alpha * (1 - alpha) / TRIALS)
    ends = outcomes(-1.0, 0.1, family=family, **settings)
    assert ends[Outcome.PASS] <= alpha + error
    assert ends[Outcome.FAIL] <= alpha + error  # at the margin, a failure would be as wrong


@pytest.mark.parametrize("deviation", [0.01, 1.0, 10.0])
def test_how_noisy_pairs_are_changes_no_error_rate(deviation):
    assert outcomes(-1.0, deviation, most=8)[Outcome.PASS] <= 0.03  # of normal differences, 1 % pass


@pytest.mark.parametrize("settings", [{}, {"most": 8}, {"power": 0.9}])
def test_a_change_that_loses_nothing_passes_with_the_stated_power(settings):
    power = settings.get("power", 0.8)
    allowed = NonInferiority(1.0, **settings).design.allowed_deviation
    error = 3 * math.sqrt(power * (1 - power) / TRIALS)
    assert abs(outcomes(0.0, allowed, **settings)[Outcome.PASS] - power) <= error
    assert outcomes(0.0, 2 * allowed, **settings)[Outcome.PASS] < power - error  # and that is not said of noisier pairs


def test_what_is_clear_is_said_at_the_first_look_and_what_is_bad_fails_sooner():
    good, bad = outcomes(0.0, 0.1, trials=100), outcomes(-3.0, 0.1, trials=100)
    assert good[Outcome.PASS] == bad[Outcome.FAIL] == 1.0
    assert good["pairs"] == FEWEST_PAIRS
    assert bad["pairs"] < 6


@pytest.mark.parametrize(("share", "looks", "most_often"), [(1 / 3, (), 0.05), (1 / 5, (14, 17, 20), 0.05)])
def test_a_change_with_which_some_trainings_collapse_does_not_pass(share, looks, most_often):
    draw = random.Random(2)
    passed = 0
    for _ in range(TRIALS):
        test = NonInferiority(1.0, looks=looks)
        for _ in range(test.most):
            test.add(50.0, 50.0 + draw.gauss(0, 0.1) - 20.0 * (draw.random() < share))
        passed += test.conclude() is Outcome.PASS
    assert passed / TRIALS <= most_often + 3 * math.sqrt(most_often * (1 - most_often) / TRIALS)


def test_a_collapse_forbids_a_pass_and_is_told_and_without_one_its_share_is_bounded():
    with_one, without, of_both = (NonInferiority(1.0) for _ in range(3))
    for number in range(20):
        with_one.add(100.0, 103.0 - 14.0 * (number == 1))  # a mean gain of 2.3 margins
        without.add(100.0, 103.0)
        of_both.add(100.0 - 14.0 * (number == 1), 103.0 - 14.0 * (number == 1))  # the seed's fault
    assert with_one.conclude() is Outcome.INCONCLUSIVE
    assert with_one.evidence()["collapses"] == 1
    assert with_one.evidence()["excluded_share"] is None
    assert "1 of 20 lost 10 or more, which forbids a PASS" in with_one.summary()
    assert without.conclude() is of_both.conclude() is Outcome.PASS
    assert (1 - without.evidence()["excluded_share"]) ** len(without) == pytest.approx(0.05)
    assert "none lost 10 or more: fewer than 1 in 3.2 do, with 95%" in without.summary()


def test_with_a_relative_margin_a_collapse_loses_half_of_the_baseline():
    test = NonInferiority(0.2, relative=True, most=8)
    for number in range(8):
        test.add(100.0, 140.0 - 91.0 * (number == 5))
    assert test.conclude() is Outcome.INCONCLUSIVE
    assert (test.evidence()["collapse"], test.evidence()["collapses"]) == (50.0, 1)


def test_too_few_pairs_are_no_pass():
    test = NonInferiority(1.0, most=7)
    for _ in range(7):
        test.add(1.0, 2.0)
    assert test.decision() is None
    assert test.conclude() is Outcome.INCONCLUSIVE


def test_equal_runs_pass_and_a_smaller_is_better_metric_turns_round():
    same, worse, better = (
        NonInferiority(0.05, relative=True),
        *(NonInferiority(0.5, larger_is_better=s) for s in (0, 1)),
    )
    for value in range(10, 18):
        same.add(value, value)
        worse.add(value, value + 1 + value / 100)
        better.add(value, value + 1 + value / 100)
    assert (same.conclude(), worse.conclude(), better.conclude()) == (Outcome.PASS, Outcome.FAIL, Outcome.PASS)
    assert same.evidence()["margin"] == pytest.approx(0.05 * 13.5)
    assert "PASS after 8 of 20 pairs" in same.summary()


def test_after_a_decision_nothing_changes():
    test = NonInferiority(1.0)
    for value in (*(1.0, 1.1, 0.9, 1.0) * 2, -50.0, -50.0, -50.0, -50.0):
        test.add(1.0, value)
    assert len(test) == 8
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
    plan = design((4, 8, 12, 16), 0.05, 0.8)
    assert (list(plan.passes), list(plan.fails)) == ([8, 12, 16], [4, 8, 12, 16])
    for bounds in (plan.passes, plan.fails):
        assert list(bounds.values()) == sorted(bounds.values(), reverse=True)
    assert plan.allowed_deviation > design((4, 8), 0.05, 0.8).allowed_deviation > 0


samples = st.lists(st.floats(-10, 10), min_size=5, max_size=20).filter(lambda sample: torch.tensor(sample).std() > 1e-3)


@given(samples, st.floats(0, 10), st.floats(0.1, 10))
def test_the_statistic_rises_with_the_mean_and_knows_no_unit(sample, more, unit):
    values = torch.tensor(sample, dtype=torch.float64)
    assert hall(values + more) >= hall(values) - 1e-9
    assert hall(unit * values).item() == pytest.approx(hall(values).item(), rel=1e-6, abs=1e-6)


def test_a_tail_on_the_lower_side_lowers_the_statistic_and_one_on_the_upper_side_leaves_students_t():
    tail = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.2, 0.1, 4.0], dtype=torch.float64)
    upper, lower = tail - tail.mean() + 1, tail.mean() - tail + 1  # both of mean 1
    t = upper.mean() / upper.std() * math.sqrt(len(tail))
    assert hall(upper).item() == pytest.approx(t.item())
    assert hall(lower) < t


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


@given(
    st.lists(st.floats(1.0, 100.0), min_size=8, max_size=8),
    st.floats(0.0, 0.09),
    st.sampled_from([1, -1]),
)
def test_seeds_that_learn_more_or_less_do_not_hide_that_nothing_is_lost(baseline, loss, side):
    test = NonInferiority(0.1, relative=True, most=8, looks=[8])
    size = sum(baseline) / len(baseline)
    for number, value in enumerate(baseline):
        # Small differences, whose mean loss is less than the margin.
        test.add(side * value, side * value - loss * size + 0.002 * size * (number % 3 - 1))
    assert test.conclude() is Outcome.PASS


@given(st.lists(st.floats(1.0, 100.0), min_size=20, max_size=20), st.floats(1.02, 5.0))
def test_a_loss_of_more_than_the_share_never_passes_however_seeds_differ(baseline, factor):
    test = NonInferiority(0.1, relative=True, most=20, looks=[20])
    for value in baseline:
        test.add(value, value * (1 - 0.1 * factor))
    assert test.conclude() is not Outcome.PASS
