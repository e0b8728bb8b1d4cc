import io
import time
from types import SimpleNamespace

import pytest

from runner.api import Objective
from runner.cli import live
from runner.cli.progress import ProgressDisplay
from runner.system.console import Console

RECIPE = SimpleNamespace(
    name="demo", length=("steps", 1000), headline=("success_rate", "return"), objective=Objective("return", "maximize")
)
METRICS = {"train/success_rate": 0.5, "eval/success_rate": 0.25, "eval/return": -3.0}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def screen(terminal=False, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def trained(display, clock, steps=(0, 250, 500)):
    for step in steps:
        clock[0] += 5
        display.advance(step, METRICS)
    return display


def test_a_line_says_phase_speeds_time_left_and_where_each_metric_is_from(clock):
    display = ProgressDisplay(screen(), RECIPE)
    display.improved(-2.0)
    with display.phase("training"):
        trained(display, clock).print_line()
    assert display.console.file.getvalue() == (
        "demo: 500/1,000 steps (50%), training, 50 steps/s (mean 50), 10 s left; "
        "eval success_rate 0.25, return -3 (best -2); train success_rate 0.5\n"
    )


@pytest.mark.parametrize("steps", [1000, 1024])
def test_after_the_last_update_no_time_is_left_and_all_is_done(steps, clock):
    display = trained(ProgressDisplay(screen(), RECIPE), clock, (0, 500, steps))
    with display.phase("evaluating"):
        clock[0] += 1
        display.print_line()
    line = display.console.file.getvalue()
    assert f"demo: {steps:,}/1,000 steps (100%), evaluating" in line
    assert "left" not in line


def test_recent_speed_is_that_of_the_last_seconds_and_the_mean_that_of_all(clock):
    display = trained(ProgressDisplay(screen(), RECIPE), clock, (0, 400, 410, 420))
    assert display.speeds() == (2.0, 28.0)
    clock[0] += 20  # an evaluation, for example
    assert display.speeds() == (0.0, 12.0)
    assert "0 steps/s (mean 12)" in display.lines()[0]


def test_between_two_phases_it_no_longer_starts(clock):
    display = ProgressDisplay(screen(), RECIPE)
    with display.phase("assembling"), display.phase("compiling"):
        clock[0] += 9
        assert display.lines() == ["compiling (9 s)"]
    clock[0] += 2
    assert display.lines() == ["preparing (2 s)"]


def test_a_warm_up_has_no_speed_and_no_part_in_the_mean(clock):
    display = ProgressDisplay(screen(), RECIPE)
    with display.phase("warm-up"):
        trained(display, clock, (0, 400))
        assert display.lines()[0] == "warm-up"
    trained(display, clock, (410, 420))
    assert display.speeds() == (2.0, 2.0)


def test_before_the_first_step_there_is_a_phase_and_no_speed(clock):
    display = ProgressDisplay(screen(), RECIPE)
    clock[0] += 3
    assert display.lines() == ["starting (3 s)"]


def test_the_innermost_phase_is_shown_once_it_lasts(clock):
    display = trained(ProgressDisplay(screen(), RECIPE), clock)
    with display.phase("training"):
        clock[0] += 5
        display.advance(510, METRICS)
        for _ in range(3):
            with display.phase("collecting"):
                clock[0] += 0.1
                assert display.lines()[0].startswith("training, ")
        with display.phase("evaluating"):
            clock[0] += 12
            assert display.lines()[0].startswith("evaluating (12 s), ")
        assert display.lines()[0].startswith("training (12 s), ")
        display.advance(520, METRICS)
        assert display.lines()[0].startswith("training, ")


def waited_for(display, text, times):
    """Whether a display has shown a text so often, in time."""
    for _ in range(1000):
        if display.console.file.getvalue().count(text) >= times:
            return True
        time.sleep(0.01)
    return False


def test_elsewhere_than_on_a_terminal_a_line_comes_at_once_and_again_without_any_step(monkeypatch):
    monkeypatch.setattr(live, "LINE_SECONDS", 0.01)
    display = ProgressDisplay(screen(), RECIPE)
    with display, display.phase("compiling"):
        assert waited_for(display, "demo: 0/1,000 steps (0%), ", 3)


@pytest.mark.parametrize(("hours", "lines"), [(1 / 60, 12), (1, 109), (2, 169)])
def test_elsewhere_than_on_a_terminal_lines_of_a_long_work_are_up_to_a_minute_apart(clock, hours, lines):
    display = trained(ProgressDisplay(screen(), RECIPE), clock)
    display.started = display.printed = clock[0]
    for _ in range(round(3600 * hours / live.LINE_SECONDS)):
        clock[0] += live.LINE_SECONDS
        display._print_next()
    assert display.console.file.getvalue().count("demo: ") == lines


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_terminal_of_any_width_gets_a_bar_and_lines_that_fit(clock, width):
    display = trained(ProgressDisplay(screen(width=width), RECIPE), clock)
    display.console.print(display.drawn())
    bar, *lines = display.console.file.getvalue().splitlines()
    assert bar.startswith("demo ")
    assert bar.endswith("500/1,000 steps (50%)")
    assert [line.split()[0] for line in lines if line.split()[0] not in ("10", "left")] == [
        "starting,",
        "eval",
        "train",
    ]
    assert "10 s left" in " ".join(" ".join(lines).split())
    assert all(len(line) <= width for line in (bar, *lines))


def test_a_terminal_is_redrawn_without_any_step():
    display = ProgressDisplay(screen(terminal=True), RECIPE)
    with display:
        assert waited_for(display, "starting", 3)


def test_quiet_is_silent():
    with ProgressDisplay(Console(file=(out := io.StringIO()), quiet=True), RECIPE) as display:
        display.advance(1, METRICS)
    assert out.getvalue() == ""


def test_a_name_with_brackets_is_no_markup(clock):
    recipe = SimpleNamespace(**vars(RECIPE) | {"name": "[red]demo"})
    display = ProgressDisplay(screen(), recipe)
    display.print_line()
    display.console.print(display.drawn())
    assert display.console.file.getvalue().count("[red]demo") == 2


def test_a_resumed_run_starts_at_its_checkpoint(clock):
    display = ProgressDisplay(screen(), RECIPE, 300)
    assert display.counted() == "300/1,000 steps (30%)"
    trained(display, clock, (300, 400))
    assert display.speeds() == (20.0, 20.0)
