"""Every command of the page about what was learnt, one after the other, on small runs."""

import re
import shlex
from pathlib import Path

import pytest
from running import forked, settings_of

PAGE = Path(__file__).parents[1] / "docs" / "learnt.md"
EXAMPLE = "marl_phase2-8628f7e7"
"""A run that the page names."""


@pytest.mark.usefixtures("migrated_workspace")
def test_the_commands_of_the_page_work_in_their_order(tmp_path, monkeypatch, isolated_workspace):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ runner (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        first = next((path.name for path in isolated_workspace.glob("runs/*")), EXAMPLE)
        words = shlex.split(command.replace(EXAMPLE, first))
        if words[0] == "run":
            words[2:2] = [part for setting in settings_of(words[1]) for part in ("--set", setting)]
        child = forked(*words)
        assert child.returncode == 0, (words, child.stderr)
    assert {path.name for path in tmp_path.iterdir()} >= {"flights.png", "flights.gif"}
