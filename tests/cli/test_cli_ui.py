"""``runner ui`` before the page: whether a browser is opened."""

import sys
import webbrowser

import pytest

from runner.cli import ui

PAGE = "http://tracking.example/#/experiments?workflowType=machine_learning"


@pytest.fixture
def opened(monkeypatch):
    """What is opened in a browser, on a terminal with a screen, where a server has the page already."""
    pages = []
    for name in ui._SCREENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", pages.append)
    monkeypatch.setattr(sys, "platform", "linux")
    return pages


def test_the_page_is_announced_and_opened(opened, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ui.ui()
    assert opened == [PAGE]
    shown = capsys.readouterr().err
    assert "runner ui" in shown
    assert shown.endswith(f"{PAGE}\n")


def test_the_page_is_not_opened_where_nobody_wants_it_or_could_see_it(opened, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ui.ui(browser=False)
    monkeypatch.delenv("DISPLAY")
    ui.ui()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    ui.ui()
    assert opened == []
    assert capsys.readouterr().err.count(f"{PAGE}\n") == 3
