"""The processes of one training: operations that all of them take part in, and their failures."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runner.distributed.heartbeat import Heartbeat
from runner.system.errors import ExitCode, RunnerError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

Value = TypeVar("Value")
TIMEOUT_SECONDS = 600.0
"""Default time in which all processes must take part in an operation."""
LAUNCH_FOLDER = "RUNNER_LAUNCH"
"""Variable with the folder in which processes leave their ending for the launcher."""
FAILURE_FILE = "failure.json"
_ANSWER_SECONDS = 3.0
"""Time that a process has to report its failure after another one has noticed it."""
_FIRST_SECONDS = 1.0
"""Time in which an error of all processes is reported by the first."""
_POLL_SECONDS = 0.02
_END_SECONDS = 5.0
"""Longest time in which torch's threads end before the process does."""
_FAILURE = "failure"
_STOP = "stop"


def _end_threads() -> None:
    """Ends the threads in which torch exchanges data, because one that calls Python after the interpreter has ended
    aborts the process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        # An operation that another process never joins lasts until its timeout.
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_END_SECONDS)


def _informed_key(rank: int) -> str:
    """Returns the key that a process sets as soon as it has read the first failure."""
    return f"informed/{rank}"


@dataclass(frozen=True)
class PeerFailure:
    """The first failure of a group of processes.

    Attributes:
        rank: The process that reported it.
        exit_code: Exit code of all processes.
        message: The message of the error.
        is_missing: Whether it is about a process that has reported nothing itself.
        is_stop: Whether a signal is the reason.
    """

    rank: int
    exit_code: int
    message: str
    is_missing: bool = False
    is_stop: bool = False


def record_failure(failure: PeerFailure) -> None:
    """Leaves a failure to the launcher of this machine, if that is the runner's and has none yet."""
    folder = os.environ.get(LAUNCH_FOLDER)
    if folder is None or Path(folder, FAILURE_FILE).exists():
        return
    Path(folder, FAILURE_FILE).write_text(json.dumps(asdict(failure)), encoding="utf-8")


class PeerError(RunnerError):
    """Raised after the failure of another process, which prints the message itself."""

    def __init__(self, failure: PeerFailure) -> None:
        message = failure.message
        if not failure.is_missing:
            message = f"process {failure.rank}: {message}"
        super().__init__(message)
        self.failure = failure
        self.exit_code = ExitCode(failure.exit_code)


class MissingPeerError(RunnerError):
    """A process of the group has ended without a message, or does not answer."""


class LostMachineError(MissingPeerError):
    """All processes of another machine that are missing; the training can be resumed elsewhere."""

    exit_code = ExitCode.PREEMPTED


class SignalVote:
    """The signal that ends the training of a group.

    Attributes:
        pending: Number of the signal that this process has received; 0 without one.
        agreed: Number of the signal at which all processes stop; 0 until they agree.
        is_failing: Whether the process is ending because of a failure, so that signals are
            ignored.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.agreed = 0
        self.is_failing = False


class ProcessGroup:
    """The processes of one training as one of them sees them.

    Attributes:
        rank: Number of this process; the first, 0, writes and prints.
        count: Number of processes.
        local_rank: Number of this process on its machine.
        local_ranks: Numbers of the processes on its machine.
        vote: The signal at which the group stops.
        cuts_batches: Whether every process takes its rows of entire batches that it is given, also
            of a source whose processes draw parts: updates are compared on such batches.
    """

    cuts_batches = False

    def __init__(
        self, store: Store, rank: int, count: int, local_rank: int = 0, local_count: int | None = None
    ) -> None:
        """Creates the group.

        Args:
            store: Shared by all processes.
            rank: Number of this process.
            count: Number of processes.
            local_rank: Number of this process on its machine.
            local_count: Number of processes on its machine; all by default.
        """
        self.rank = rank
        self.count = count
        self.local_rank = local_rank
        first_rank = rank - local_rank
        self.local_ranks = range(first_rank, first_rank + (local_count or count))
        self.vote = SignalVote()
        self._store = store
        self._timeout_s = TIMEOUT_SECONDS
        self._decisions = 0

    def connect(self, device_type: str, timeout_s: float | None = None) -> None:
        """Connects the processes, which the collective operations need.

        Args:
            device_type: ``cpu`` or ``cuda``.
            timeout_s: Time in which all processes must take part in an operation.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        if dist.is_initialized():
            return
        self._timeout_s = timeout_s or TIMEOUT_SECONDS
        # Objects are exchanged in the memory of the host, also if gradients are not.
        backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
        with self._shared_store():
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(seconds=self._timeout_s),
            )
        Heartbeat(self._store, self.rank)
        atexit.register(self._end)

    def rows(self, size: int) -> slice:
        """Returns the samples of this process in a batch of that size.

        The parts of all processes are consecutive, do not overlap, and differ by one sample at
        most.

        Raises:
            RunnerError: The batch has fewer samples than there are processes.
        """
        if size < self.count:
            raise RunnerError(
                f"a batch of {size} samples cannot be divided among {self.count} processes; use fewer processes"
            )
        start = self.rank * size // self.count
        stop = (self.rank + 1) * size // self.count
        return slice(start, stop)

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all processes, with the same bits in each."""
        import torch.distributed as dist

        with self._collective():
            dist.all_reduce(tensor)

    def min_in_place(self, tensor: Tensor) -> None:
        """Replaces the elements of a tensor by the smallest of all processes."""
        import torch.distributed as dist

        with self._collective():
            dist.all_reduce(tensor, dist.ReduceOp.MIN)

    def exchange(self, operation: Callable[[], Value]) -> Value:
        """Calls an operation of torch in which all processes take part, and returns its result."""
        with self._collective():
            return operation()

    def copy_first(self, tensor: Tensor) -> None:
        """Replaces a tensor by that of the first process."""
        import torch.distributed as dist

        with self._collective():
            dist.broadcast(tensor, src=0)

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all processes, by rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        with self._collective():
            dist.all_gather_object(values, value)
        return values

    def gather_first(self, value: Value) -> list[Value]:
        """Returns the values of all processes in the first one, and nothing in the others."""
        import torch.distributed as dist

        values: list[Any] = [] if self.rank else [None] * self.count
        with self._collective():
            dist.gather_object(value, None if self.rank else values, dst=0)
        return values

    def broadcast(self, value: Any = None, rank: int = 0) -> Any:
        """Returns the value of a process, by default of the first."""
        import torch.distributed as dist

        values = [value]
        with self._collective():
            dist.broadcast_object_list(values, src=rank)
        return values[0]

    def decide(self, make: Callable[[], Value]) -> Value:
        """Returns what the first process makes, a value in JSON; the others wait for it, as long as
        it shows signs of life.

        This needs no connection, so it can decide what is trained.

        Raises:
            MissingPeerError: The first process has connected, and has stopped since then.
        """
        self._decisions += 1
        key = f"decision/{self._decisions}"
        if not self.rank:
            value = make()
            with self._shared_store():
                self._store.set(key, json.dumps(value))
            return value
        with self._shared_store():
            decision: Value = self._awaited(key, 0)
        return decision

    def collect(self, value: Value) -> list[Value]:
        """Returns the values of all processes, in JSON, in the first one, and nothing in the others.

        Like ``decide``, it waits as long as they show signs of life.
        """
        self._decisions += 1
        key = f"decision/{self._decisions}"
        with self._shared_store():
            if self.rank:
                self._store.set(f"{key}/{self.rank}", json.dumps(value))
                return []
            return [value, *(self._awaited(f"{key}/{rank}", rank) for rank in range(1, self.count))]

    def _awaited(self, key: str, rank: int) -> Any:
        """Waits for a value that another process stores, and returns it."""
        beats = 0
        beaten_at = time.monotonic()
        while not self._store.check([key]):
            failure = self._failure()
            if failure is not None:
                raise PeerError(failure)
            now = time.monotonic()
            latest = self._store.add(f"beats/{rank}", 0)
            if latest != beats:
                beats = latest
                beaten_at = now
            # A process that has not connected yet shows no signs.
            elif beats and now - beaten_at >= self._timeout_s:
                name = f"process {rank} of {self.count}"
                raise self._missing([rank], f"{name} has not answered for {self._timeout_s:g} s (train.stall_s)")
            time.sleep(_POLL_SECONDS)
        return json.loads(bytes(self._store.get(key)))

    def require_equal(self, digest: bytes, problem: str) -> None:
        """Raises a RunnerError if a digest differs between processes."""
        digests = self.gather(digest)
        if len(set(digests)) > 1:
            raise RunnerError(problem)

    def claim_failure(self, error: BaseException, message: str = "") -> PeerFailure | None:
        """Reports the failure of this process to the others.

        If all processes have the same error, that of the first one is reported.

        Args:
            error: The error.
            message: Its message, if it is not that of the error.

        Returns:
            The failure that another process has reported before; None if this is the first, whose
                message is to be printed.
        """
        self.vote.is_failing = True
        exit_code = getattr(error, "exit_code", ExitCode.FAILED)
        if isinstance(error, KeyboardInterrupt):
            exit_code = ExitCode.INTERRUPTED
        message = message or str(error) or type(error).__name__
        is_missing = isinstance(error, MissingPeerError)
        try:
            self._wait_for_first()
            first_failure = self._claim(PeerFailure(self.rank, int(exit_code), message, is_missing))
            self._store.set(_informed_key(self.rank), "1")
            return first_failure
        # The process with the store may be gone.
        except RuntimeError:
            record_failure(PeerFailure(self.rank, int(exit_code), message, is_missing))
            return None

    def _end(self) -> None:
        """Ends torch's threads, and keeps the store until the others have read a failure."""
        _end_threads()
        # The first process may have the store, without which the others cannot read the reason.
        if self.vote.is_failing and self.rank == 0:
            self._wait_until_informed()

    def _wait_until_informed(self) -> None:
        keys = [_informed_key(rank) for rank in range(1, self.count)]
        end = time.monotonic() + _ANSWER_SECONDS
        # The store may be that of a launcher that has ended.
        with suppress(RuntimeError):
            while not all(self._store.check([key]) for key in keys) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)

    def claim_stop(self, exit_code: ExitCode, reason: str) -> None:
        """Reports that this process ends because of a signal before the others agreed."""
        stop = PeerFailure(self.rank, int(exit_code), reason, is_stop=True)
        self._store.set(_STOP, json.dumps(asdict(stop)))

    def _claim(self, failure: PeerFailure) -> PeerFailure | None:
        text = json.dumps(asdict(failure))
        stored = bytes(self._store.compare_set(_FAILURE, "", text)).decode()
        first_failure = PeerFailure(**json.loads(stored))
        record_failure(first_failure)
        return None if first_failure.rank == self.rank else first_failure

    def _wait_for_first(self) -> None:
        """Waits a moment for a failure of the first process, which has the files of the run."""
        end = time.monotonic() + _FIRST_SECONDS
        while self.rank and self._failure() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _failure(self) -> PeerFailure | None:
        """Returns the failure that was reported first, or else a stop; None without one."""
        for key in (_FAILURE, _STOP):
            if self._store.check([key]):
                return PeerFailure(**json.loads(bytes(self._store.get(key))))
        return None

    @contextmanager
    def _shared_store(self) -> Iterator[None]:
        """Replaces torch's error about a lost store by the reason for it."""
        try:
            yield
        except RuntimeError as error:
            raise self._missing([0], "the first process or the launcher has ended") from error

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Replaces torch's error about a lost connection by the reason for it."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.vote.is_failing = True
            has_waited = time.monotonic() - started >= self._timeout_s
            raise self._reason(error, has_waited) from error

    def _reason(self, error: RuntimeError, has_waited: bool) -> RunnerError:
        """Returns why an operation failed: what a process has reported, or which is missing."""
        try:
            return self._reported_reason(error, has_waited)
        except RuntimeError:
            return self._missing([0], f"the first of {self.count} processes has ended")

    def _reported_reason(self, error: RuntimeError, has_waited: bool) -> RunnerError:
        self._store.set(f"present/{self.rank}", "1")
        keys = [f"present/{rank}" for rank in range(self.count)]
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end:
            failure = self._failure()
            if failure is not None:
                return PeerError(failure)
            if all(self._store.check([key]) for key in keys):
                break
            time.sleep(_POLL_SECONDS)
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if not missing:
            return RunnerError(f"the processes cannot exchange data: {error}")
        name = f"process {', '.join(map(str, missing))} of {self.count}"
        if has_waited:
            limit = f"{self._timeout_s:g} s (train.stall_s)"
            return self._missing(missing, f"{name} has not answered for {limit}")
        return self._missing(missing, f"{name} has ended without a message")

    def _missing(self, ranks: Sequence[int], problem: str) -> MissingPeerError:
        """Returns the error about missing processes, which names a lost machine as such."""
        if any(rank in self.local_ranks for rank in ranks):
            return MissingPeerError(problem)
        return LostMachineError(f"{problem}; its machine may be lost")
