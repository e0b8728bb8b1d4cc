"""In place of Ray, which is too large for the tests: tasks are processes of this machine.

``FAKE_RAY`` has the nodes as JSON, each with its resources; ``crashes: true`` lets every task end without a result.
"""

import json
import os
import signal
import sys
from multiprocessing.connection import wait as wait_for

from children import CONTEXT, begin

from ray.exceptions import RayError, TaskCancelledError

_cluster = {}


class Task:
    """A task of the cluster."""

    def __init__(self, function, arguments):
        begin()
        self.is_cancelled = False
        self.receiver, sender = CONTEXT.Pipe(duplex=False)
        where = str(os.getcwd())
        order = (where, dict(os.environ), list(sys.path), sender, function, arguments)
        self.process = CONTEXT.Process(target=_perform, args=order)
        self.process.start()
        sender.close()


def init(address, **options):
    """Connects to the cluster that the variable describes."""
    if "FAKE_RAY" not in os.environ:
        raise ConnectionError(f"Could not find any running Ray instance at {address}.\nMore lines.")
    _cluster.update(json.loads(os.environ["FAKE_RAY"]))
    # As Ray does.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(99))


def nodes():
    """Describes the nodes, and one that was lost."""
    alive = [{"Alive": True, "Resources": resources} for resources in _cluster["nodes"]]
    return [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}]


def remote(**options):
    """Returns a decorator that makes a function a task."""
    assert options["max_retries"] > 0

    class Remote:
        def __init__(self, function):
            self.function = function

        def remote(self, *arguments):
            return Task(_crash if _cluster.get("crashes") else self.function, arguments)

    return Remote


def wait(tasks, timeout):
    """Returns the tasks that have ended within the time, at most one, and the others."""
    ready = wait_for([task.receiver for task in tasks], timeout)
    ended = [task for task in tasks if task.receiver in ready][:1]
    return ended, [task for task in tasks if task not in ended]


def get(task):
    """Returns the result of a task."""
    try:
        result = task.receiver.recv()
    except EOFError:
        raise RayError("several lines\nThe worker died unexpectedly.") from None
    task.process.join()
    if task.is_cancelled:
        raise TaskCancelledError
    return result


def cancel(task):
    """Interrupts a task."""
    task.is_cancelled = True
    os.kill(task.process.pid, signal.SIGINT)


def shutdown():
    """Does nothing: tasks end by themselves."""


def _perform(where, environment, paths, sender, function, arguments):
    import children

    children._enter(where, environment)
    sys.path[:] = paths
    children._begin()
    sender.send(function(*arguments))


def _crash(*arguments):
    os._exit(1)
