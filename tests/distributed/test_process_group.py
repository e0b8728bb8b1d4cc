"""Processes wait for a decision as long as the one that makes it shows signs of life."""

import threading
import time

import pytest
from torch.distributed import HashStore

from runner.distributed import process_group
from runner.distributed.process_group import MissingPeerError, ProcessGroup
from runner.system.errors import RunnerError


def groups(limit_s):
    """Returns the two members of a group that shares a store."""
    store = HashStore()
    members = ProcessGroup(store, 0, 2), ProcessGroup(store, 1, 2)
    for member in members:
        member._timeout_s = limit_s
    return store, *members


def beat(store, rank, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.add(f"beats/{rank}", 1)
        time.sleep(0.02)


@pytest.mark.parametrize(("rank", "wait"), [(0, "decide"), (1, "collect")])
def test_a_process_that_has_stopped_is_not_waited_for(rank, wait):
    store, first, second = groups(0.2)
    beat(store, rank, 0.1)
    waiting = second if wait == "decide" else first
    with pytest.raises(MissingPeerError, match=rf"process {rank} of 2 has not answered for 0\.2 s \(train\.stall_s\)"):
        getattr(waiting, wait)(lambda: None)


def test_a_slow_decision_of_a_process_that_is_alive_is_waited_for():
    store, first, second = groups(0.5)
    beating = threading.Thread(target=beat, args=(store, 0, 1.2))
    beating.start()
    deciding = threading.Timer(1.0, lambda: first.decide(lambda: {"step": 3}))
    deciding.start()
    assert second.decide(lambda: None) == {"step": 3}
    beating.join()
    deciding.join()


def test_a_process_that_has_not_connected_yet_is_waited_for():
    _, first, second = groups(0.1)
    deciding = threading.Timer(0.6, lambda: first.decide(lambda: 7))
    deciding.start()
    assert second.decide(lambda: None) == 7
    deciding.join()


def test_the_first_process_stays_until_the_others_know_why_it_failed(monkeypatch):
    store, first, second = groups(1.0)
    assert first.claim_failure(RunnerError("diverged")) is None
    failures = []
    claiming = threading.Timer(0.5, lambda: failures.append(second.claim_failure(RunnerError("diverged"))))
    claiming.start()
    monkeypatch.setattr(process_group, "_ANSWER_SECONDS", 60.0)
    first._end()
    assert store.check(["informed/1"])
    claiming.join()
    assert [failure.message for failure in failures] == ["diverged"]


def test_the_first_process_does_not_wait_for_ever_or_without_a_failure(monkeypatch):
    _, first, _ = groups(1.0)
    # Would wait for a minute.
    monkeypatch.setattr(process_group, "_ANSWER_SECONDS", 60.0)
    first._end()
    first.claim_failure(RunnerError("diverged"))
    monkeypatch.setattr(process_group, "_ANSWER_SECONDS", 0.1)
    first._end()
