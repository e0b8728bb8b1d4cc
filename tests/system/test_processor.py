"""How threads and wait policy are chosen and changed: by pure functions, and in real processes."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system import processor
from runner.system.contention import Contention, ContentionMeter
from runner.system.processor import (
    LONGEST_QUIET_SECONDS,
    QUIET_SECONDS,
    SHARE,
    THREAD_VARIABLES,
    WAIT_VARIABLES,
    Surroundings,
    WaitSwitch,
    choose,
    share_processor,
    thread_variables,
    user_variables,
)

QUIET = Contention(waited=0.02, other_cores=0.05)
LOADED = Contention(waited=0.6, other_cores=1.7)
counts = st.integers(1, 128)
surroundings = st.builds(
    Surroundings,
    cores=counts,
    default_threads=counts,
    locked_threads=st.none() | counts,
    other_runs=st.integers(0, 8),
    contention=st.builds(Contention, st.floats(0, 1), st.floats(0, 128)),
)
settings_of_waiting = st.sampled_from(["auto", "active", "passive"])
settings_of_threads = st.just("auto") | counts
user_settings = st.dictionaries(
    st.sampled_from([*THREAD_VARIABLES, *WAIT_VARIABLES]), st.sampled_from(["1", "4", "passive"])
)


@given(settings_of_threads, settings_of_waiting, user_settings, surroundings)
def test_the_users_variables_win_and_are_recorded(threads, wait, variables, known):
    use = choose(threads, wait, variables | {"HOME": "/"}, known)
    assert use.variables == variables
    if variables.keys() & set(THREAD_VARIABLES):
        assert use.threads == known.default_threads
        assert use.threads_reason.endswith("is set")
    if variables.keys() & set(WAIT_VARIABLES):
        assert use.wait_reason.endswith("is set")
        assert (use.wait == "passive") == (variables.get("OMP_WAIT_POLICY") == "passive")
    assert json.loads(json.dumps(use.data())) == use.data()


@given(settings_of_threads, settings_of_waiting, surroundings, surroundings)
def test_the_number_of_threads_does_not_depend_on_load(threads, wait, known, later):
    loaded = later._replace(
        cores=known.cores,
        default_threads=known.default_threads,
        locked_threads=known.locked_threads,
    )
    assert choose(threads, wait, {}, known).threads == choose(threads, wait, {}, loaded).threads


@given(settings_of_waiting, surroundings)
def test_threads_are_the_recipes_then_the_locks_then_those_that_are_allowed(wait, known):
    assert choose(3, wait, {}, known).threads == 3
    expected = known.locked_threads or min(known.default_threads, known.cores)
    assert choose("auto", wait, {}, known).threads == expected


@given(settings_of_threads, surroundings)
def test_a_policy_of_the_recipe_is_used_whatever_the_load(threads, known):
    assert choose(threads, "active", {}, known).wait == "active"
    assert choose(threads, "passive", {}, known).wait == "passive"


@given(surroundings)
def test_threads_sleep_only_where_something_needs_their_cores(known):
    use = choose("auto", "auto", {}, known)
    is_free = known.contention.waited <= 0.1 or known.contention.other_cores <= 0.2
    is_enough = use.threads * (1 + known.other_runs) <= known.cores
    if use.threads == 1 or (is_free and is_enough):
        assert use.wait == "active"
    if use.threads > 1 and not is_enough:
        assert use.wait == "passive"


@pytest.mark.parametrize(
    ("known", "wait", "reason"),
    [
        (Surroundings(2, 2, contention=QUIET), "active", "2 cores and nothing else that needs them"),
        (
            Surroundings(2, 2, contention=LOADED),
            "passive",
            "other programs use 1.7 of 2 cores, and a thread waited 60% of its time for a core",
        ),
        (Surroundings(8, 8, other_runs=2), "passive", "2 other runs of the workspace compute on 8 cores"),
        (Surroundings(8, 8, locked_threads=2, other_runs=2), "active", "8 cores and nothing else that needs them"),
        (Surroundings(2, 2, locked_threads=4), "passive", "4 threads share 2 cores"),
        (Surroundings(2, 1, contention=LOADED), "active", "one thread waits for no other"),
    ],
)
def test_the_reason_is_recorded(known, wait, reason):
    use = choose("auto", "auto", {}, known)
    assert (use.wait, use.wait_reason) == (wait, reason)


@given(counts)
def test_a_childs_share_of_the_cores_is_not_the_users_choice(threads):
    variables = thread_variables(threads, {"HOME": "/"})
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert user_variables(variables) == {}
    assert choose("auto", "auto", variables, Surroundings(128, threads, 7)).threads == 7
    assert thread_variables(threads, {"OMP_NUM_THREADS": "3"}) == {}
    assert user_variables({**variables, "OMP_NUM_THREADS": "130"}) == {"OMP_NUM_THREADS": "130"}
    assert SHARE in thread_variables(threads, variables)


class Recorded:
    """Control that records what it is made to do."""

    def __init__(self):
        self.sleeps = False
        self.switches = []

    def sleep(self):
        if not self.sleeps:
            self.switches.append("sleep")
        self.sleeps = True
        return True

    def spin(self):
        self.switches.append("spin")
        self.sleeps = False


def watched(is_auto=True, **variables):
    control = Recorded()
    use = choose("auto", "auto" if is_auto else "active", variables, Surroundings(2, 2))
    return WaitSwitch(control, use, is_auto, cores=2), control


def test_load_that_comes_later_makes_threads_sleep_until_it_is_gone(caplog):
    switch, control = watched()
    for contention in [QUIET, LOADED, LOADED, QUIET]:
        switch.observe(contention, 1.0)
    assert control.switches == ["sleep"]
    switch.observe(QUIET, QUIET_SECONDS)
    assert control.switches == ["sleep", "spin"]
    assert [record.message for record in caplog.records] == [
        "other programs use 1.7 of 2 cores, and a thread waited 60% of its time for a core: "
        "until that ends, threads sleep while they wait for each other, which changes no digit"
    ]


@given(st.lists(st.sampled_from([QUIET, LOADED]), max_size=200))
def test_switching_becomes_rarer(samples):
    switch, control = watched()
    for contention in samples:
        switch.observe(contention, 5.0)
    spins = control.switches.count("spin")
    needed = [min(QUIET_SECONDS * 2**number, LONGEST_QUIET_SECONDS) for number in range(spins)]
    assert sum(needed) <= 5.0 * samples.count(QUIET)
    assert control.switches.count("sleep") - spins in (0, 1)


@pytest.mark.parametrize(
    ("is_auto", "variables", "fix"),
    [
        (False, {}, "set system.wait=auto"),
        (False, {"OMP_WAIT_POLICY": "active"}, "unset OMP_WAIT_POLICY"),
        (False, {"GOMP_SPINCOUNT": "1000000"}, "unset GOMP_SPINCOUNT"),
    ],
)
def test_what_the_user_has_fixed_is_only_reported_once(caplog, is_auto, variables, fix):
    switch, control = watched(is_auto, **variables)
    for _ in range(3):
        switch.observe(LOADED, 1.0)
    assert control.switches == []
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [fix]


SLEEPERS = """
import json, resource, sys, time
import torch
from runner.system import openmp, processor
values = torch.randn(200_000)

def sleeps():
    # Regions with a moment between them: a thread that spins does not leave its core, one that sleeps does.
    for _ in range(20):
        values.mul(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(300):
        values.mul(2)
        end = time.perf_counter() + 5e-5
        while time.perf_counter() < end:
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

def least_sleeps():
    # On a busy machine, a thread that spins is interrupted now and then, and the other one sleeps meanwhile.
    return min(sleeps() for _ in range(8))

found = {"threads": torch.get_num_threads(), "before": least_sleeps()}
with processor.share_processor(2, "passive") as use:
    found |= {"inside": sleeps(), "digits": values.relu().sum().item(), "wait": use.wait}
found |= {"after": least_sleeps(), "same": found["digits"] == values.relu().sum().item()}
print(json.dumps(found))
"""


def without_variables(**variables):
    names = (*THREAD_VARIABLES, *WAIT_VARIABLES)
    return {name: text for name, text in os.environ.items() if name not in names} | variables


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="switches GNU's OpenMP on Linux")
def test_threads_of_a_process_sleep_and_spin_again():
    """The scheduler's own count, in a process with two threads: torch has its OpenMP, and no variable is set."""
    command = [sys.executable, "-c", SLEEPERS]
    child = subprocess.run(
        command, env=without_variables(OMP_NUM_THREADS="2"), capture_output=True, text=True, check=True
    )
    found = json.loads(child.stdout)
    assert (found["threads"], found["wait"], found["same"]) == (2, "passive", True)
    assert found["inside"] >= 200
    assert found["inside"] > 2 * max(found["before"], found["after"])


def test_threads_are_set_for_a_computation_and_put_back():
    import torch

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in THREAD_VARIABLES:
            patch.delenv(name, raising=False)
        with share_processor(threads=before + 2, wait="active") as use:
            assert torch.get_num_threads() == use.threads == before + 2
        with share_processor(locked_threads=before + 1):
            assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_meter_knows_a_busy_process_from_a_quiet_machine(monkeypatch):
    from runner.system import contention

    clocks = iter(
        [
            contention._Times(0.0, 0.0, 100.0, {"1": (0.0, 0.0), "2": (5.0, 5.0)}),
            contention._Times(10.0, 8.0, 126.0, {"1": (4.0, 6.0), "2": (5.1, 5.1), "3": (1.0, 9.0)}),
            contention._Times(20.0, 16.0, None, {"1": (14.0, 6.0)}),
        ]
    )
    monkeypatch.setattr(contention, "_times", lambda: next(clocks))
    meter = ContentionMeter()
    assert meter.read() == pytest.approx((0.9, 1.8))
    assert meter.read() == (0.0, float("inf"))


def test_real_clocks_are_numbers():
    waited, others = ContentionMeter().read()
    assert 0 <= waited <= 1
    assert others >= 0
    assert processor.SINCE_START.read().other_cores >= 0
