"""Decides how a computation shares the processor: its threads, and how they wait for each other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from runner.system.contention import SINCE_START, Contention, ContentionMeter
from runner.system.hardware import usable_cores
from runner.system.openmp import WaitControl
from runner.system.text_lines import amount

WaitMode = Literal["active", "passive"]
Wait = Literal["auto"] | WaitMode
Threads = Literal["auto"] | int

SHARE = "RUNNER_THREADS"
"""Variable that marks ``THREAD_VARIABLES`` as set by the parent process, and not by the user."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLES = (
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
)  # fmt: skip
"""Variables that decide how threads wait, or that an idle team of threads cannot work with."""
_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")

SAMPLE_SECONDS = 1.0
QUIET_SECONDS = 15.0
"""Without load, after which threads spin again; doubled each time, so that switching ends."""
LONGEST_QUIET_SECONDS = 600.0
_VARIABLE_FIX = "set OMP_WAIT_POLICY=passive in the environment"
_SLEEPS = "until that ends, threads sleep while they wait for each other, which changes no digit"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessorUse:
    """The use of the processor by a computation at its start, with the reasons.

    Attributes:
        threads: Threads of one parallel region, which may decide about the last digits.
        threads_reason: What decided about them.
        wait: How threads wait for each other, which changes no digit; ``auto`` may change it later.
        wait_reason: What decided about that.
        variables: Variables of the user's environment for OpenMP and MKL.
    """

    threads: int
    threads_reason: str
    wait: WaitMode
    wait_reason: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        threads = f"{amount(self.threads, 'threads')} ({self.threads_reason})"
        return f"{threads}, wait {self.wait} ({self.wait_reason})"

    def data(self) -> dict[str, Any]:
        """Returns plain values for the lock of a run."""
        return asdict(self)


class Surroundings(NamedTuple):
    """The state of the machine at the start of a computation.

    Attributes:
        cores: Cores that this process may use.
        default_threads: Torch's default number of threads.
        locked_threads: Threads of a resumed run at its start.
        other_runs: Other runs of the workspace that compute on this machine.
        contention: Load of other programs since this process started.
    """

    cores: int
    default_threads: int
    locked_threads: int | None = None
    other_runs: int = 0
    contention: Contention = Contention(0.0, 0.0)


def user_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the user's variables for OpenMP and MKL, without those of a parent process."""
    names = sorted(name for name in environment if name.startswith(_PREFIXES))
    variables = {name: environment[name] for name in names}
    for name in THREAD_VARIABLES:
        if SHARE in environment and variables.get(name) == environment[SHARE]:
            del variables[name]
    return variables


def thread_variables(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that give a child process the number of threads; none if the
    user has set them.
    """
    if not user_variables(environment).keys().isdisjoint(THREAD_VARIABLES):
        return {}
    return dict.fromkeys((*THREAD_VARIABLES, SHARE), str(threads))


def is_fixed_by(variables: Mapping[str, str]) -> bool:
    """Returns whether the user's variables decide how threads wait."""
    return not variables.keys().isdisjoint(WAIT_VARIABLES)


def choose(threads: Threads, wait: Wait, environment: Mapping[str, str], known: Surroundings) -> ProcessorUse:
    """Chooses threads and wait mode: by the user's variables, the recipe, and what is known."""
    variables = user_variables(environment)
    count, count_reason = _choose_threads(threads, variables, SHARE in environment, known)
    mode, mode_reason = _choose_mode(wait, variables, count, known)
    return ProcessorUse(count, count_reason, mode, mode_reason, variables)


def _choose_threads(
    threads: Threads, variables: Mapping[str, str], is_share: bool, known: Surroundings
) -> tuple[int, str]:
    """Ignores load: a recipe and a seed should have the same digits whatever else is running."""
    names = [name for name in THREAD_VARIABLES if name in variables]
    if names:
        return known.default_threads, f"{names[0]}={variables[names[0]]} is set"
    if known.locked_threads is not None and threads == "auto":
        return known.locked_threads, "as at the start of the run"
    if threads != "auto":
        return threads, f"system.threads={threads}"
    if is_share:
        return known.default_threads, "its share of the cores"
    if known.default_threads > known.cores:
        return known.cores, f"{known.cores} cores are allowed"
    return known.default_threads, f"torch's choice for {known.cores} cores"


def _choose_mode(wait: Wait, variables: Mapping[str, str], threads: int, known: Surroundings) -> tuple[WaitMode, str]:
    names = [name for name in WAIT_VARIABLES if name in variables]
    if names:
        is_passive = variables.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
        return "passive" if is_passive else "active", f"{names[0]}={variables[names[0]]} is set"
    if wait != "auto":
        return wait, f"system.wait={wait}"
    if threads == 1:
        return "active", "one thread waits for no other"
    if threads > known.cores:
        return "passive", f"{threads} threads share {known.cores} cores"
    if known.other_runs and threads * (1 + known.other_runs) > known.cores:
        other_runs = f"{known.other_runs} other runs of the workspace"
        return "passive", f"{other_runs} compute on {known.cores} cores"
    if known.contention.is_high(known.cores):
        return "passive", describe(known.contention, known.cores)
    return "active", f"{known.cores} cores and nothing else that needs them"


def describe(contention: Contention, cores: int) -> str:
    """Returns what makes the processor count as shared."""
    waited = f"a thread waited {contention.waited:.0%} of its time for a core"
    if contention.other_cores > cores:  # also where it is unknown
        return waited
    return f"other programs use {contention.other_cores:.1f} of {cores} cores, and {waited}"


class Waiting(Protocol):
    """Interface for switching how threads wait."""

    @property
    def sleeps(self) -> bool:
        """Returns whether waiting threads sleep."""

    def sleep(self) -> bool:
        """Makes waiting threads sleep; False if that is not possible."""

    def spin(self) -> None:
        """Makes waiting threads spin."""


class WaitSwitch:
    """Decides from one sample to the next whether threads sleep or spin while they wait.

    Args:
        control: The OpenMP runtimes of this process, or of several.
        use: The use of the processor at the start of the computation.
        is_auto: Whether the mode may change; otherwise contention is reported once, with the fix.
        cores: Cores that this process may use.
    """

    def __init__(self, control: Waiting, use: ProcessorUse, is_auto: bool, cores: int) -> None:
        self._control = control
        self._use = use
        self._is_auto = is_auto
        self._cores = cores
        self._quiet_seconds = 0.0
        self._needed_seconds = QUIET_SECONDS
        self._is_reported = False

    def observe(self, contention: Contention, seconds: float) -> None:
        """Takes what was measured in the last seconds, and switches if that is worth it."""
        if contention.is_high(self._cores):
            self._quiet_seconds = 0.0
            self._is_reported |= self._control.sleeps
            is_switched = self._is_auto and self._control.sleep()
            self._report(contention, is_switched)
        elif self._control.sleeps and self._is_auto:
            self._quiet_seconds += seconds
            if self._quiet_seconds >= self._needed_seconds:
                self._needed_seconds = min(2 * self._needed_seconds, LONGEST_QUIET_SECONDS)
                self._control.spin()

    def _report(self, contention: Contention, is_switched: bool) -> None:
        if self._is_reported:
            return
        self._is_reported = True
        reason = describe(contention, self._cores)
        if is_switched:
            _log.warning("%s: %s", reason, _SLEEPS)
            return
        fix = _VARIABLE_FIX
        if not self._is_auto:
            name = self._use.wait_reason.removesuffix(" is set")
            is_setting = name.startswith("system.wait")
            fix = "set system.wait=auto" if is_setting else f"unset {name.partition('=')[0]}"
        _log.warning("%s: threads that wait for each other spin, which is slow; %s", reason, fix)


class _Watch(threading.Thread):
    """Measures contention during the computation until it is stopped."""

    def __init__(self, switch: WaitSwitch, meter: ContentionMeter) -> None:
        super().__init__(name="runner-processor", daemon=True)
        self._switch = switch
        self._meter = meter
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Runs in the thread."""
        while not self._is_stopped.wait(SAMPLE_SECONDS):
            self._switch.observe(self._meter.read(), SAMPLE_SECONDS)

    def stop(self) -> None:
        """Ends the thread."""
        self._is_stopped.set()
        self.join()


def set_threads(threads: Threads) -> None:
    """Gives this process the threads of a recipe, for as long as it lives."""
    import torch

    surroundings = Surroundings(usable_cores(), torch.get_num_threads())
    count = choose(threads, "auto", os.environ, surroundings).threads
    # Setting the same number would still change how MKL selects its number.
    if count != surroundings.default_threads:
        torch.set_num_threads(count)


@contextmanager
def share_processor(
    threads: Threads = "auto",
    wait: Wait = "auto",
    locked_threads: int | None = None,
    other_runs: int = 0,
) -> Iterator[ProcessorUse]:
    """Computes inside the ``with`` with these threads, which wait as other programs permit.

    Args:
        threads: Threads of a parallel region; auto keeps torch's number within the allowed cores.
        wait: How they wait; auto follows the load of the machine.
        locked_threads: Threads of a resumed run at its start; auto keeps them.
        other_runs: Other runs of the workspace that compute on this machine.

    Yields:
        The use of the processor at the start, for the lock of a run.
    """
    import torch

    initial_threads = torch.get_num_threads()
    cores = usable_cores()
    surroundings = Surroundings(cores, initial_threads, locked_threads, other_runs, SINCE_START.read())
    use = choose(threads, wait, os.environ, surroundings)
    is_fixed = is_fixed_by(use.variables)
    is_auto = wait == "auto" and not is_fixed
    control = WaitControl()
    with ExitStack() as stack:
        # Setting the same number would still change how MKL selects its number.
        if use.threads != initial_threads:
            torch.set_num_threads(use.threads)
            stack.callback(torch.set_num_threads, initial_threads)
        stack.callback(control.spin)
        if use.wait == "passive" and not is_fixed and not control.sleep():
            _log.warning("system.wait: this torch has no GNU OpenMP; %s", _VARIABLE_FIX)
        if control.sleeps and is_auto:
            _log.warning("%s: %s", use.wait_reason, _SLEEPS)
        if use.threads > 1 and (is_auto or use.wait == "active"):
            watch = _Watch(WaitSwitch(control, use, is_auto, cores), ContentionMeter())
            watch.start()
            stack.callback(watch.stop)
        yield use
