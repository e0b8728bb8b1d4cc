"""Two groups of seeds, or of folds, are compared in pairs where these agree."""

import io
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import seed_group
from scipy.stats import t, ttest_ind, ttest_rel

from runner.cli.seeds import show_comparison
from runner.recipe.dumping import dump
from runner.system.console import Console
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import Workspace
from runner.tracking.group_comparison import compare, difference

VALUES = st.lists(st.integers(-50, 50).map(float), min_size=3, max_size=8)


def numbered(values):
    return dict(enumerate(values))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_paired", [True, False])
def test_a_difference_of_values_that_are_not_finite_is_nan(value, is_paired):
    values = numbered([1.0, 2.0]), numbered([1.0, value])
    assert all(map(math.isnan, difference(*values, is_paired)))
    assert all(map(math.isnan, difference(*reversed(values), is_paired)))


# Values that are nearly the same are part of the comparison.
@pytest.mark.filterwarnings("ignore:Precision loss occurred")
@given(VALUES, st.data())
def test_seeds_are_compared_as_scipy_does(baseline, data):
    candidate = data.draw(st.lists(st.integers(-50, 50).map(float), min_size=len(baseline), max_size=len(baseline)))
    for is_paired, test in ((True, ttest_rel), (False, lambda one, other: ttest_ind(one, other, equal_var=False))):
        interval = difference(numbered(baseline), numbered(candidate), is_paired)
        assert interval.mean == pytest.approx(fmean(candidate) - fmean(baseline))
        spread = np.ptp(np.subtract(candidate, baseline)) if is_paired else np.ptp(baseline) + np.ptp(candidate)
        if spread == 0:
            assert interval.low == interval.high
            continue
        bounds = test(candidate, baseline).confidence_interval(0.95)
        assert interval[1:] == pytest.approx((bounds.low, bounds.high))


@given(VALUES, st.floats(0.1, 2))
def test_folds_allow_for_shared_samples(values, shift):
    candidate = [value + shift * (-1) ** position for position, value in enumerate(values)]
    folds = len(values)
    interval = difference(numbered(values), numbered(candidate), True, has_folds=True)
    differences = np.subtract(candidate, values)
    # Nadeau and Bengio: (1 / k + 1 / (k - 1)) times the variance of a difference.
    half_width = t.ppf(0.975, folds - 1) * math.sqrt(differences.var(ddof=1) * (1 / folds + 1 / (folds - 1)))
    assert interval.high - interval.mean == pytest.approx(half_width, abs=1e-9)


def test_folds_of_other_samples_are_wider_than_seeds():
    baseline, candidate = {0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 3.5, 2: 4.5}
    seeds = difference(baseline, candidate, False)
    folds = difference(baseline, candidate, False, has_folds=True)
    # Both sides have as many folds, so that the degrees of freedom are the same.
    assert folds.high - folds.mean == pytest.approx((seeds.high - seeds.mean) * math.sqrt(5 / 2))


def fold_group(*values, seed=0):
    """Writes a group of folds whose objective has these values."""
    group, runs = seed_group(*values, kind="folds", unit="folds", digests={i: f"of {v}" for i, v in enumerate(values)})
    for fold, folder in enumerate(runs):
        folds = {"count": len(values), "index": fold, "by": "random"}
        recipe = {"name": "marl", "seed": seed, "data": {"kind": "table", "folds": folds}}
        (folder.path / LOCK_NAME).write_text(dump({"lock": 1, "recipe": recipe}))
    return group


def shown(compared, width=80):
    stream = io.StringIO()
    show_comparison(compared, Console(file=stream, width=width))
    return stream.getvalue()


def test_folds_of_the_same_samples_are_pairs(isolated_workspace):
    groups = [fold_group(0.5, 0.6, 0.9), fold_group(0.51, 0.62, 0.93)]
    compared = compare(Workspace(), [group.name for group in groups])
    assert (compared["kind"], compared["paired"]) == ("folds", True)
    row = compared["metrics"]["return"]
    assert row["values"] == [{0: 0.5, 1: 0.6, 2: 0.9}, {0: 0.51, 1: 0.62, 2: 0.93}]
    assert row["difference"]["mean"] == pytest.approx(0.02)
    text = shown(compared)
    assert "paired by fold" in " ".join(text.split())
    assert "3 of 3" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("other", [{"seed": 1}, {"more": 0.7}])
def test_folds_of_other_samples_are_no_pairs(other, isolated_workspace):
    more = [other.pop("more")] if "more" in other else []
    groups = [fold_group(0.5, 0.6, 0.9), fold_group(0.51, 0.62, 0.93, *more, **other)]
    compared = compare(Workspace(), [group.name for group in groups])
    assert not compared["paired"]
    assert "with other folds" in " ".join(shown(compared).split())


def test_folds_and_seeds_are_not_compared(isolated_workspace):
    group, _ = seed_group(10, 14)
    folds = fold_group(0.5, 0.6)
    with pytest.raises(UsageError) as caught:
        compare(Workspace(), [group.name, folds.name])
    expected = f"{group.name} is of seeds and {folds.name} is of folds: compare two groups of the same kind"
    assert str(caught.value) == expected


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "RUNNING", "PREEMPTED"])
@pytest.mark.parametrize("side", [0, 1])
def test_runs_that_have_not_finished_are_left_out_with_their_counterparts(status, side, isolated_workspace):
    groups = [seed_group(10, 14, 19), seed_group(10, 14, 19, began=10.0)]
    folder = groups[side][1][1]
    folder.write(folder.record().model_copy(update={"status": status}))
    compared = compare(Workspace(), [group.name for group, _ in groups])
    assert compared["paired"]
    assert compared["metrics"]["return"]["values"] == [{10: 10.0, 19: 19.0}] * 2
    assert compared["left_out"] == {group.name: [14] for group, _ in groups}
    assert "without seeds 14, not finished here or in the other group" in " ".join(shown(compared, 200).split())


def test_other_seeds_are_compared_without_those_that_have_not_finished(isolated_workspace):
    (group, _), (other, runs) = seed_group(10, 14), seed_group(1, 2, 3, began=10.0)
    runs[0].write(runs[0].record().model_copy(update={"status": "FAILED"}))
    compared = compare(Workspace(), [group.name, other.name])
    assert not compared["paired"]
    assert compared["metrics"]["return"]["values"] == [{10: 10.0, 14: 14.0}, {2: 2.0, 3: 3.0}]
    assert compared["left_out"] == {other.name: [1]}


def test_a_single_finished_pair_is_no_comparison(isolated_workspace):
    (group, runs), (other, _) = seed_group(10, 14), seed_group(10, 14, began=10.0)
    runs[0].write(runs[0].record().model_copy(update={"status": "FAILED"}))
    with pytest.raises(UsageError, match="has no two seeds that finished and were evaluated"):
        compare(Workspace(), [group.name, other.name])
