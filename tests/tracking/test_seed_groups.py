"""What several seeds come to together."""

import math

import pytest
from canvases import cut, kept, told
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from run_folders import seed_group
from running import tiny
from scipy.stats import t

from runner.system.interval import student
from runner.tracking import Workspace
from runner.tracking.group_comparison import compare, difference
from runner.tracking.seeds import bounds_for, bounds_of, draw, evaluations, final_means, last, means
from runner.tracking.spool import Spool

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8)
CURVES = {
    "loss": {0: {10: 1.0, 20: 0.5}, 1: {10: 1.2, 20: 0.7}, 2: {10: 1.4}},
    "reached": {0: {10: 0.1}, 1: {10: 0.2}},
}


@given(VALUES)
def test_the_interval_is_that_of_scipy(values):
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
    low, high = t.interval(0.95, len(values) - 1, mean, spread) if spread else (mean, mean)
    found = student(values)
    assert found.low == pytest.approx(low, abs=1e-6)
    assert found.high == pytest.approx(high, abs=1e-6)


def test_one_value_says_nothing_of_the_mean():
    assert student([3.0]) == (3.0, -math.inf, math.inf)


def test_trainings_that_ended_at_different_steps_are_compared_by_their_last_evaluations():
    ((name, step, mean),) = final_means(CURVES, 3, {})
    assert (name, step) == ("loss", 20)
    assert mean.mean == pytest.approx((0.5 + 0.7 + 1.4) / 3)
    ended_together = {"loss": {0: {10: 1.0, 20: 0.5}, 1: {20: 0.7}}}
    assert list(final_means(ended_together, 2, {})) == []
    assert list(final_means({"reached": CURVES["reached"]}, 3, {})) == []


def test_means_are_taken_where_every_seed_was_evaluated():
    assert [(name, step) for name, step, _ in means(CURVES, 3, {})] == [("loss", 10)]
    assert last(CURVES)["loss"] == {0: 0.5, 1: 0.7, 2: 1.4}


NUMBERS = st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=3), min_size=2, max_size=3))
def test_the_last_mean_is_that_of_the_last_values_and_nan_if_one_of_them_is_not_finite(values_by_seed):
    curves = {"loss": {seed: dict(enumerate(values)) for seed, values in enumerate(values_by_seed)}}
    count = len(values_by_seed)
    final_values = [values[-1] for values in values_by_seed]
    all_means = [*means(curves, count, {}), *final_means(curves, count, {})]
    last_mean = all_means[-1][2]
    assert list(last(curves)["loss"].values()) == pytest.approx(final_values, nan_ok=True)
    if all(map(math.isfinite, final_values)):
        assert last_mean == student(final_values)
    else:
        assert all(map(math.isnan, last_mean))
    assert all(map(math.isnan, last_mean.widened(2.0).clipped(0.0, 1.0))) == math.isnan(last_mean.mean)


def test_evaluations_that_are_not_finite_are_the_last_ones_like_others():
    _, (folder,) = seed_group(1)
    spool = Spool(folder.spool)
    spool.append(t=2, step=20, metrics={"eval/loss": "NaN", "eval/other": "Infinity"})
    spool.close()
    last_values = last(evaluations({1: folder}))
    assert math.isnan(last_values["loss"][1])
    assert last_values["other"] == {1: math.inf}


def test_what_is_not_finite_is_not_drawn(tmp_path):
    curves = {
        "never": {0: {10: math.nan}, 1: {10: math.inf}},
        "loss": {0: {10: 1.0, 20: math.nan}, 1: {10: 2.0, 20: math.inf}},
    }
    (path,) = draw(curves, ["never"], "updates", tmp_path, {})
    assert path.exists()
    assert draw({"never": curves["never"]}, [], "updates", tmp_path / "other", {}) == []


SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=5)


@settings(max_examples=60)
@given(SHARES, st.sampled_from(["*_rate", "success_rate", "success*"]))
def test_no_interval_exceeds_the_bounds_of_its_metric(values, pattern):
    curves = {"success_rate": {seed: {10: value} for seed, value in enumerate(values)}}
    ((_, _, interval),) = means(curves, len(values), {pattern: (0.0, 1.0)})
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    ((_, _, unbounded),) = means(curves, len(values), {"other": (0.0, 1.0)})
    assert unbounded == student(values)


def test_metrics_that_plugins_declare_are_shares_and_counts():
    bounds = bounds_of(tiny("marl_phase2"))
    assert bounds_for("success_rate", bounds) == (0, 1)
    assert bounds_for("steps_to_goal", bounds) == (0, math.inf)
    assert bounds_for("return", bounds) == (-math.inf, math.inf)
    assert bounds_for("accuracy", bounds_of(tiny("digits_classifier"))) == (0, 1)


def test_runs_of_the_same_seeds_are_pairs():
    one, other = {0: 1.0, 1: 5.0, 2: 9.0}, {0: 1.1, 1: 5.12, 2: 9.11}
    paired = difference(one, other, True)
    assert 0 < paired.low < paired.mean < paired.high
    apart = difference(one, {seed + 3: value for seed, value in other.items()}, False)
    assert apart.low < 0 < apart.high
    assert apart.mean == pytest.approx(paired.mean)


def test_the_picture_has_a_panel_for_each_metric(tmp_path):
    (file,) = draw(CURVES, ["reached", "unknown"], "epochs", tmp_path, {})
    with Image.open(file) as picture:
        assert picture.width > 2 * picture.height
    assert draw({}, ["loss"], "epochs", tmp_path, {}) == []


def test_seeds_that_share_no_step_are_drawn_without_a_mean(tmp_path):
    assert len(draw({"loss": {0: {10: 1.0}, 1: {20: 0.5}}}, ["loss"], "epochs", tmp_path, {})) == 1


def test_the_picture_says_how_many_seeds_and_what_is_drawn_and_cuts_no_point(tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    draw(CURVES, [], "epochs", tmp_path, {})
    (figure,) = figures.values()
    assert told(figure) == {"one seed", "mean of the seeds", "its 95 % interval"}
    assert [axes.get_title() for axes in figure.axes] == [
        f"{name}, {len(CURVES[name])} seeds" for name in sorted(CURVES)
    ]
    assert cut(figure) == []
    draw({"loss": {0: {10: 1.0}, 1: {20: 0.5}}}, ["loss"], "epochs", tmp_path, {})
    assert told(figures["curves"]) == {"one seed"}
    draw({"loss": {0: {10: 1.0, 20: 0.5}}}, ["loss"], "epochs", tmp_path, {})
    assert told(figures["curves"]) == {"one seed"}
    assert figures["curves"].axes[0].get_title() == "loss"


def test_groups_are_compared_by_names_digits_and_beginnings_and_nothing_else_is_a_group(isolated_workspace):
    (one, runs), (other, _) = seed_group(10, 14), seed_group(11, 17)
    found = compare(Workspace(), [one.name, other.name[-8:]])
    assert found["groups"] == [one.name, other.name]
    assert not found["paired"]
    assert found["metrics"]["return"]["difference"]["mean"] == 2.0
    assert compare(Workspace(), [one.name[:-1], other.name]) == found
    for names in ([one.name, runs[0].name], [one.name], [one.name, "nothing"], [one.name, other.name, one.name]):
        assert compare(Workspace(), names) is None
