"""Batches of a dataset, loaded in this process or by worker processes.

Worker processes start with unread data: their parent never reads them, and file descriptors that a
fork inherits are reopened. An error in a worker is raised in the parent as the original exception.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import signal
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from runner.plugin.batches import deliver
from runner.plugin.failures import Failure, describe_full_shared_memory
from runner.plugin.inspection import Inspection
from runner.system.errors import RunnerError, UsageError


def own_files(worker: int = 0) -> None:  # noqa: ARG001 (DataLoader passes the worker's number)
    """Gives this process a separate position in every inherited file.

    Forked processes share the position of an open file: each read of one moves it for all of them.
    """
    descriptors = Path("/proc/self/fd")
    for name in os.listdir(descriptors) if descriptors.is_dir() else ():
        descriptor = int(name)
        # Some are closed by now (that of the listing), and some may not be opened again.
        with suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            is_readable = flags & os.O_ACCMODE != os.O_WRONLY
            if not (stat.S_ISREG(os.fstat(descriptor).st_mode) and is_readable):
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            inheritable = os.get_inheritable(descriptor)
            reopened = os.open(descriptors / name, flags & (os.O_ACCMODE | os.O_APPEND))
            os.lseek(reopened, position, os.SEEK_SET)
            os.dup2(reopened, descriptor, inheritable)
            os.close(reopened)


def load_batches(
    data: Dataset[Any],
    plan: Iterable[Any] | None,
    workers: int,
    generator: torch.Generator,
    *,
    prefetch: int = 1,
    pinned: bool = False,
) -> Iterator[Any]:
    """Loads batches in order.

    Args:
        data: Makes the batches.
        plan: Keys of a map-style dataset, one for each batch; None for a stream.
        workers: Worker processes; 0 loads in this process.
        generator: Generator from which torch draws the seeds of the workers.
        prefetch: Batches that each worker has ready.
        pinned: Whether tensors are copied into pinned memory.

    Raises:
        RunnerError: A worker was lost, or the data cannot be sent to one.
    """
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": pinned,
        "generator": generator,
    }
    if workers:
        options |= {"prefetch_factor": prefetch, "worker_init_fn": own_files}
    if plan is not None:
        options["sampler"] = plan
    loader = DataLoader(data, batch_size=None, collate_fn=deliver, **options)
    iterator = _started(loader, workers)
    try:
        yield from _loaded(iterator, workers, data)
    finally:
        # The garbage collector closes the queues before workers are stopped, and torch waits 5 s
        # for each.
        for process in getattr(iterator, "_workers", ()):
            process.terminate()


def _loaded(iterator: Iterator[Any], workers: int, data: Dataset[Any]) -> Iterator[Any]:
    """Yields the batches of a loader; failures of workers are raised."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            if workers and (message := _lost_worker(error, iterator, data)):
                raise RunnerError(message) from error
            raise
        if isinstance(batch, Failure):
            batch.reraise()
        yield batch


def _started(loader: DataLoader[Any], workers: int) -> Iterator[Any]:
    """Starts the workers of a loader."""
    # torch installs a signal handler that raises in any statement when a worker ends. The handler
    # of before is restored, and lost workers are reported by ``_lost_worker``.
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        with warnings.catch_warnings():
            # The message of the UsageError has more details.
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            iterator = iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        if not workers or not _is_of_pickling(error):
            raise
        data: Any = loader.dataset
        dataset = data.train if isinstance(data, Inspection) else data.data
        problem = f"'{type(dataset).__name__}' cannot be sent to workers ({error})"
        hint = (
            "open files, connections and iterators at the first access, in the worker, "
            "or use data.workers: 0"
        )
        raise UsageError(f"data.workers: {workers}: {problem}: {hint}") from error
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return iterator


def _is_of_pickling(error: Exception) -> bool:
    return isinstance(error, pickle.PicklingError) or "pickle" in str(error)


def _lost_worker(error: Exception, iterator: Any, data: Any) -> str | None:
    """Returns the message about a worker that ended; None if the error has another cause."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        hint = "raise the limit (ulimit -n 65536), or use fewer data.workers"
        return f"data.workers: too many open files: {hint}"
    processes = getattr(iterator, "_workers", ())
    if isinstance(error, OSError | EOFError):
        # A worker that dies while it sends breaks the connection before its parent sees the exit.
        exited = wait([process.sentinel for process in processes], timeout=5)
        for process in processes:
            if process.sentinel in exited:
                process.join()
    elif "DataLoader worker" not in str(error):
        return None
    exit_codes = [process.exitcode for process in processes]
    worker = next((number for number, code in enumerate(exit_codes) if code), None)
    if worker is None:
        return f"data.workers: {type(error).__name__}: {error}"
    code = exit_codes[worker]
    if code == -signal.SIGBUS:
        return describe_full_shared_memory()
    problem = f"a worker process {_ending(code)}{_position(data, worker)}"
    hint = "data.workers: 0 shows where"
    if code == -signal.SIGKILL:
        hint = (
            "the kernel does this when memory runs out; "
            "use fewer data.workers, or data.workers: 0"
        )
    return f"data.workers: {problem}: {hint}"


def _ending(code: int) -> str:
    """Describes the exit code of a process."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _position(data: Any, worker: int) -> str:
    """Describes the sample that a worker was reading; empty if it is unknown."""
    reading = getattr(data, "reading", None)
    sample = None if reading is None else reading.of(worker)
    if sample is None:
        return ""
    return f" while it read sample {sample} of the {data.data_name}"


# A forked process does not collect what it inherits: the end of a loader stops its workers, which
# are those of the parent.
os.register_at_fork(after_in_child=gc.freeze)
