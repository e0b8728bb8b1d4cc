import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from sqlalchemy import create_engine

from runner.study import leases as module
from runner.study.leases import Leases
from runner.system import processes
from runner.system.processes import Owner

HOLD = """
import sys
from sqlalchemy import create_engine
from runner.study.leases import Leases
leases = Leases(create_engine(sys.argv[1], connect_args={"timeout": 60}), "mine")
print(all([leases.claim(int(trial)) for trial in sys.argv[2:]]), flush=True)
sys.stdin.read()
"""
RACE = """
import sys
from sqlalchemy import create_engine
from runner.study.leases import Leases
leases = Leases(create_engine(sys.argv[1], connect_args={"timeout": 60}), "mine")
print("ready", flush=True)
sys.stdin.readline()
print(*[trial for trial in range(12) if leases.claim(trial)], flush=True)
sys.stdin.read()
"""


def engine(url):
    return create_engine(url, connect_args={"timeout": 60})


@pytest.fixture
def worker(storage_url):
    """Makes workers of this process; each has connections of its own."""
    made = []

    def make(study="mine", **settings):
        made.append(engine(storage_url))
        return Leases(made[-1], study, **settings)

    yield make
    for each in made:
        each.dispose()


@pytest.fixture
def clock(monkeypatch):
    """What the clock of this machine shows, to be put forward."""
    now = SimpleNamespace(value=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: now.value))
    return now


@contextmanager
def child(script, *arguments):
    """A process of Python that runs a script, and is killed at the end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def elsewhere(monkeypatch):
    """Whoever claims inside is on another machine."""
    with process(monkeypatch, host="far-away", boot_id="1", namespace="pid:[1]"):
        yield


@contextmanager
def process(monkeypatch, **changes):
    """Whoever claims inside is another process."""
    owner = Owner.this_process().model_copy(update=changes)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "this_process", lambda: owner)
        yield


def at_once(*calls):
    """Calls all of them at the same moment, each in a thread of its own; what they returned."""
    barrier, found = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number):
        barrier.wait()
        found[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_only_one_of_many_threads_gets_a_trial(worker):
    workers = [worker() for _ in range(8)]
    for trial in range(3):
        found = at_once(*(lambda each=each, trial=trial: each.claim(trial) for each in workers))
        assert found.count(True) == 1
        assert workers[0].holder(trial).worker == workers[found.index(True)].worker


def test_every_trial_is_of_one_of_several_processes(storage_url):
    with child(RACE, storage_url) as one, child(RACE, storage_url) as two, child(RACE, storage_url) as three:
        racing = [one, two, three]
        assert [each.stdout.readline() for each in racing] == ["ready\n"] * 3
        for each in racing:
            each.stdin.write("go\n")
            each.stdin.flush()
        taken = [int(trial) for each in racing for trial in each.stdout.readline().split()]
        assert sorted(taken) == list(range(12))


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "not asked after by its parent"])
def test_exactly_one_gets_the_trial_of_a_dead_process_and_at_once(worker, storage_url, reaped):
    workers = [worker() for _ in range(6)]
    with child(HOLD, storage_url, 0, 1) as holder:
        assert holder.stdout.readline() == "True\n"
        assert at_once(*(lambda each=each: each.claim(0) for each in workers)) == [False] * 6
        holder.send_signal(signal.SIGKILL)
        if reaped:
            holder.wait()
        else:
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        found = at_once(*(lambda each=each: each.claim(0) for each in workers))
    assert found.count(True) == 1
    assert workers[0].holder(0).pid == os.getpid()
    assert workers[0].holder(1).pid == holder.pid


def test_nobody_gets_the_trial_of_a_process_that_lives_however_silent_it_is(worker, storage_url, clock):
    other = worker(dead_seconds=0.0)
    with child(HOLD, storage_url, 0) as holder:
        assert holder.stdout.readline() == "True\n"
        for _ in range(3):
            clock.value += 1e6
            assert not other.claim(0)
        assert other.holder(0).pid == holder.pid


def test_a_process_with_the_number_of_a_dead_one_is_another(worker, monkeypatch):
    with process(monkeypatch, born=12345.0):
        assert worker().claim(0)
    assert worker().claim(0)


def test_who_holds_a_trial_does_not_get_it_twice(worker):
    one = worker()
    assert one.claim(0)
    assert not one.claim(0)
    assert one.beat(0)


def test_a_holder_elsewhere_is_dead_after_a_silence_and_not_before(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch):
        assert far.claim(0)
    for seconds in (0.0, 59.0, 1.0):  # seen from here, from the first look on
        clock.value += seconds
        assert not near.claim(0)
    clock.value += 0.5
    assert near.claim(0)
    assert near.holder(0).worker == near.worker


def test_a_holder_from_before_this_machine_was_started_anew_is_dead_at_once(worker, monkeypatch, clock):
    before, after = worker(), worker(dead_seconds=1e9)
    with process(monkeypatch, boot_id="another-boot", namespace="pid:[1]", machine="another-machine"):
        assert before.claim(0)
    assert not after.claim(0)  # a machine of the same name
    before.release(0)
    with process(monkeypatch, boot_id="another-boot", namespace="pid:[1]", machine="this-machine"):
        assert before.claim(0)
    monkeypatch.setattr(processes, "machine_id", lambda: "this-machine")
    assert after.claim(0)


def test_a_holder_elsewhere_is_known_to_live_when_it_has_been_seen_to_beat(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch):
        assert far.claim(0)
    assert near.alive(near.holder(0)) is None
    assert far.beat(0)
    assert near.alive(near.holder(0)) is True
    clock.value += 61.0
    assert near.alive(near.holder(0)) is False
    assert near.claim(1)
    assert near.alive(near.holder(1)) is True


def test_every_beat_of_a_holder_elsewhere_begins_a_new_silence(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch):
        assert far.claim(0)
    for _ in range(3):
        assert not near.claim(0)
        clock.value += 50.0
        assert far.beat(0)
    assert not near.claim(0)


def test_the_clock_of_another_machine_does_not_matter(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(time=lambda: 5.0, monotonic=lambda: 0.0))
        assert far.claim(0)
    assert near.holder(0).seen == 5.0
    assert not near.claim(0)


def test_only_one_gets_the_trial_of_a_holder_elsewhere(worker, monkeypatch, clock):
    far, near = worker(), [worker(dead_seconds=60.0) for _ in range(6)]
    with elsewhere(monkeypatch):
        assert far.claim(0)
    assert not any(each.claim(0) for each in near)
    clock.value += 61.0
    assert at_once(*(lambda each=each: each.claim(0) for each in near)).count(True) == 1


def test_who_was_taken_for_dead_learns_it_from_the_next_beat(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch):
        assert far.claim(0)
        assert far.beat(0)
    assert not near.claim(0)
    clock.value += 61.0
    assert near.claim(0)
    assert not far.beat(0)
    assert near.beat(0)
    far.release(0)
    assert near.holder(0).worker == near.worker


def test_a_holder_that_beats_again_at_the_last_moment_keeps_its_trial(worker, monkeypatch, clock):
    far, near = worker(), worker(dead_seconds=60.0)
    with elsewhere(monkeypatch):
        assert far.claim(0)
    stale = near.holder(0)
    assert near.alive(stale) is None
    clock.value += 61.0
    assert near.alive(stale) is False
    assert far.beat(0)
    monkeypatch.setattr(near, "holder", lambda trial: stale)
    assert not near.claim(0)
    assert far.beat(0)


def test_a_beat_says_that_its_worker_lives(worker):
    one = worker()
    assert not one.beat(0)  # nobody's
    one.claim(0)
    before = one.holder(0)
    assert one.beat(0)
    assert one.beat(0)
    after = one.holder(0)
    assert (before.beats, after.beats) == (0, 2)
    assert after.seen >= before.seen
    assert (after.pid, after.place, after.born) == (before.pid, before.place, before.born)


def test_a_trial_that_was_given_up_is_anybodys(worker):
    one, other = worker(), worker()
    one.claim(0)
    other.release(0)
    assert not other.claim(0)
    one.release(0)
    one.release(0)
    assert one.holder(0) is None
    assert not one.beat(0)
    assert other.claim(0)


def test_studies_have_leases_of_their_own(worker):
    mine, yours = worker("mine"), worker("yours")
    assert mine.claim(0)
    assert mine.claim(7)
    assert yours.claim(0)
    assert sorted(lease.trial for lease in mine.all()) == [0, 7]
    mine.clear()
    assert mine.all() == []
    assert [lease.worker for lease in yours.all()] == [yours.worker]


def test_several_workers_may_make_the_table_at_once(tmp_path):
    url = f"sqlite:///{tmp_path / 'new.db'}"
    engines = [engine(url) for _ in range(6)]
    workers = at_once(*(lambda each=each: Leases(each, "mine") for each in engines))
    assert [each.claim(0) for each in workers].count(True) == 1
    for each in engines:
        each.dispose()


def test_only_one_at_a_time_is_let_through_and_all_of_them_in_the_end(worker):
    inside, most, workers = [], [], [worker() for _ in range(4)]

    def enter(each):
        with each.waiting(-1):
            inside.append(each)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(each)

    at_once(*(lambda each=each: enter(each) for each in workers))
    assert most == [1] * 4
    assert workers[0].all() == []


def test_whoever_fails_inside_lets_the_next_one_through(worker):
    one, other = worker(), worker()
    with pytest.raises(ZeroDivisionError), one.waiting(-1):
        raise ZeroDivisionError
    with other.waiting(-1):
        assert other.holder(-1).worker == other.worker
