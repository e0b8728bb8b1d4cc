"""Child processes that work together."""

import pytest
from running import tiny

from runner.child.group import ChildGroup
from runner.child.spawn import Cause, Child, ChildError


@pytest.mark.usefixtures("copied_children")
def test_the_reason_of_the_process_that_failed_is_that_of_all(monkeypatch, tmp_path):
    # As in a process that a launcher has started: its folder is for failures of the training.
    monkeypatch.setenv("RUNNER_LAUNCH", str(tmp_path))
    with ChildGroup("failing_group", tiny("digits_classifier"), 2) as group, pytest.raises(ChildError) as caught:
        group.answer(60)
    assert caught.value.cause is Cause.OUT_OF_MEMORY
    assert "no memory in the second process" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("copied_children")
def test_the_first_process_ends_if_the_second_does_not_start(monkeypatch):
    started = []

    def start(*arguments, **options):
        if started:
            raise OSError("no more processes")
        started.append(Child(*arguments, **options))
        return started[0]

    monkeypatch.setattr("runner.child.group.Child", start)
    with pytest.raises(OSError, match="no more processes"):
        ChildGroup("failing_group", tiny("digits_classifier"), 2)
    assert started[0]._wait(0.0) is not None
