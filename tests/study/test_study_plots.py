import builtins
from dataclasses import replace
from itertools import pairwise

import matplotlib.image
import pytest
from canvases import beneath, cut, kept, told, written
from summaries import RETURN, ROWS, SPEED, single, summary

from runner.study.study_plots import draw

SLICES = ["slice-merged_critic_loss", "slice-amp", "slice-optimizer.actor.lr"]


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (summary(), ["progress", "front", "importance", *SLICES]),
        (replace(single(), importance={}), ["progress", *SLICES]),
        (summary(rows=ROWS[3:5], importance={}), ["progress", "front", *SLICES]),
        (summary(rows=ROWS[4:], importance={}), []),
        (summary(rows=[], importance={}), []),
    ],
)
def test_pictures_are_drawn_of_what_there_is(found, names, tmp_path):
    files = draw(found, tmp_path)
    assert files == [tmp_path / f"{name}.png" for name in names]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        height, width, _ = matplotlib.image.imread(file).shape
        assert min(height, width) > 200


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **settings):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    assert draw(summary(), tmp_path) == []


def test_every_picture_says_what_is_drawn_and_how_often_and_cuts_no_point(tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    draw(summary(), tmp_path)
    trials = {"trial", "not counted", "recipe as it is", "Pareto front"}
    assert told(figures["progress"]) == trials | {"best so far", "no value"}
    assert told(figures["front"]) == trials
    for name, figure in figures.items():
        assert cut(figure) == []
        assert name == "importance" or figure.get_suptitle() == "4 trials with a value, each the mean of 3 seeds"
    assert written(figures["importance"].axes[0]) == ["71 %", "29 %", "0 %"]
    draw(replace(single(), seeds=1), tmp_path)
    assert figures["progress"].get_suptitle() == "4 trials with a value, one seed each"
    assert "best" in told(figures["progress"])


def test_a_setting_stands_against_every_objective_on_the_scale_that_all_settings_share(tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    rows = [replace(each, settings=dict(each.settings)) for each in ROWS]
    del rows[1].settings["optimizer.actor.lr"]  # it does not exist in every trial
    rows[2].settings["optimization.amp"] = "off"
    rows[3].settings["optimizer.actor.lr"] = 0.003
    draw(summary(rows=rows), tmp_path)
    amp, rate = figures["slice-amp"], figures["slice-optimizer.actor.lr"]
    assert [axes.get_title(loc="left") for axes in amp.axes] == [f"{RETURN} ↑", f"{SPEED} ↑"]
    assert [axes.get_ylim() for axes in amp.axes] == [axes.get_ylim() for axes in rate.axes]
    assert [text.get_text() for text in amp.axes[1].get_xticklabels()] == ["off", "{dtype: bf16}"]
    assert rate.axes[1].get_xscale() == "log"
    assert rate.get_suptitle() == "3 trials with a value, each the mean of 3 seeds"


@pytest.mark.parametrize(("high", "some"), [(0.003, {"0.0003", "0.001", "0.003"}), (10.0, {"0.001", "0.1", "10"})])
def test_no_two_numbers_of_a_logarithmic_scale_run_into_each_other(high, some, tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    rows = [replace(ROWS[0], settings={"optimizer.actor.lr": high}), ROWS[1]]
    draw(summary(rows=rows), tmp_path)
    numbers = beneath(figures["slice-optimizer.actor.lr"])
    assert some <= {text for *_, text in numbers}
    assert all(one[1] < other[0] for one, other in pairwise(numbers))


def test_trials_that_came_to_the_same_are_named_in_one_place(tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    draw(summary(rows=[*ROWS, replace(ROWS[1], number=9)]), tmp_path)
    assert sorted(written(figures["front"].axes[0])) == ["1, 9", "2"]
