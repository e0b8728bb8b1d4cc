"""What a person sees of a study that searches."""

import io
from types import SimpleNamespace

import pytest

from runner.cli import live
from runner.cli.study_progress import TrialsBar
from runner.system.console import Console

STUDY = SimpleNamespace(name="demo", budget=SimpleNamespace(trials=12, seconds=600.0))
ENDLESS = SimpleNamespace(name="demo", budget=SimpleNamespace(trials=12, seconds=None))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def bar(config=None):
    made = TrialsBar(Console(file=io.StringIO(), width=80), "study run")
    if config is not None:
        made.opened(config)
    return made


def test_before_a_study_is_known_it_says_what_is_done(clock):
    shown = bar()
    shown.print_line()
    assert shown.console.file.getvalue() == "runner study run: 0 s, reading the study\n"


def test_a_line_says_the_budget_the_trials_and_the_best_so_far(clock):
    shown = bar(STUDY)
    shown.standing(3, 130.0, {"eval/return": 12.345678})
    shown.trial(4, "waiting for the gate")
    shown.trial(3, "training", "1,200/40,000 steps (3%), eval/return -3.2")
    clock[0] += 0.5
    shown.print_line()
    assert shown.console.file.getvalue() == (
        "demo: 3/12 trials, 130/600 s, trial 3: training, 1,200/40,000 steps (3%), eval/return -3.2; "
        "trial 4: waiting for the gate; best so far: eval/return 12.35\n"
    )


def test_a_trial_that_stands_still_says_for_how_long(clock):
    shown = bar(STUDY)
    shown.trial(0, "training", "5/9 steps")
    for figures in ("5/9 steps", "5/9 steps"):
        clock[0] += 4
        shown.trial(0, "training", figures)
    assert shown.lines() == ["trial 0: training (8 s), 5/9 steps"]
    shown.trial(0, "training", "6/9 steps")
    assert shown.lines() == ["trial 0: training, 6/9 steps"]


def test_between_trials_it_says_the_phase_since_the_last_one(clock):
    shown = bar(STUDY)
    with shown.phase("looking for a trial"):
        shown.trial(0, "training")
        clock[0] += 50
        shown.standing(1, 50.0, {})
        shown.trial(0, "")
        clock[0] += 2
        assert shown.lines() == ["looking for a trial (2 s)"]


def test_the_seconds_of_the_budget_go_on_while_a_trial_does(clock):
    shown = bar(STUDY)
    shown.standing(1, 100.0, {})
    clock[0] += 60
    assert shown.counted() == "1/12 trials, 100/600 s"
    shown.trial(1, "training")
    assert (shown.counted(), shown.completed()) == ("1/12 trials, 160/600 s", 160 / 600)


def test_a_budget_without_seconds_counts_trials(clock):
    shown = bar(ENDLESS)
    shown.standing(6, 90.0, {})
    assert (shown.counted(), shown.completed()) == ("6/12 trials, 90 s", 0.5)
