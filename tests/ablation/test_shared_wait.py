"""All processes of a round wait in the same way."""

import pytest

from runner.ablation import shared_wait
from runner.ablation.shared_wait import SharedWait
from runner.recipe.recipe import SystemConfig
from runner.system.contention import Contention
from runner.system.processor import QUIET_SECONDS, SAMPLE_SECONDS, THREAD_VARIABLES

QUIET = Contention(waited=0.0, other_cores=0.0)
LOADED = Contention(waited=0.8, other_cores=1.9)


@pytest.fixture
def waits(monkeypatch):
    """Builds the waits of an ablation with two threads on two cores, and the list of its commands."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shared_wait, "usable_cores", lambda: 2)

    def build(wait="auto", at_start=QUIET):
        monkeypatch.setattr(shared_wait.SINCE_START, "read", lambda: at_start)
        commands = []
        return SharedWait(SystemConfig(threads=2, wait=wait), commands.append), commands

    return build


def test_load_switches_all_processes_before_the_next_round(waits):
    shared, commands = waits()
    assert shared.mode == "active"
    shared.observe([QUIET, LOADED, QUIET])  # a moment, in one process of three
    assert commands == []
    shared.observe([LOADED, LOADED, QUIET])
    assert (shared.mode, commands) == ("passive", ["sleep"])
    for _ in range(round(QUIET_SECONDS / SAMPLE_SECONDS)):
        shared.observe([LOADED, LOADED])
        shared.observe([QUIET])
    assert commands == ["sleep"]
    for _ in range(round(QUIET_SECONDS / SAMPLE_SECONDS)):
        shared.observe([QUIET])
    assert (shared.mode, commands) == ("active", ["sleep", "spin"])


def test_a_loaded_machine_is_known_before_the_first_process(waits):
    shared, commands = waits(at_start=LOADED)
    assert (shared.mode, commands) == ("passive", [])


@pytest.mark.parametrize("wait", ["active", "passive"])
def test_what_the_recipe_fixes_stays(waits, wait):
    shared, commands = waits(wait, at_start=LOADED)
    shared.observe([LOADED])
    assert (shared.mode, commands) == (wait, [])


def test_a_variable_of_the_user_stays(waits, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    shared, commands = waits(at_start=LOADED)
    shared.observe([LOADED])
    assert (shared.mode, commands) == ("active", [])
