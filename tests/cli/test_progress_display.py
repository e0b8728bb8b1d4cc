import io

import pytest
from rich.console import Console

from runner.cli import progress
from runner.cli.progress import ProgressDisplay


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(clock, terminal, width=80):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    with ProgressDisplay(console, "demo", 1000, "steps", ("success_rate", "return")) as display:
        for step in (0, 250, 500):
            clock[0] += 5
            display.advance(step, {"train/success_rate": 0.5, "eval/success_rate": 0.25, "eval/return": -3.0})
    return out.getvalue()


def test_lines_elsewhere_say_speed_newest_metrics_and_time_left(clock):
    lines = shown(clock, terminal=False).splitlines()
    assert lines[-1] == "demo: 500/1,000 steps (50%), 50 steps/s, success_rate 0.5, return -3, 10 s left"
    assert len(lines) == 2  # the clock starts with the first call


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_terminal_of_any_width_gets_a_bar_and_one_line(clock, width):
    text = shown(clock, terminal=True, width=width)
    assert "demo" in text
    assert "50 steps/s" in text


def test_a_name_with_brackets_is_no_markup(clock):
    console = Console(file=io.StringIO(), width=80)
    display = ProgressDisplay(console, "[red]demo", 10, "steps", ())
    for step in (0, 5):
        clock[0] += 6
        display.advance(step, {})
    assert "[red]demo: 5/10" in console.file.getvalue()
