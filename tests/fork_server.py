"""The process that children are copies of, which has imported everything: one for all test processes."""

import os
import pkgutil
from importlib.metadata import entry_points
from multiprocessing import forkserver, get_context
from pathlib import Path
from threading import Lock
from unittest.mock import patch

import runner

CONTEXT = get_context("forkserver")
GARBAGE = (10_000, 10, 10)
"""Thresholds of garbage collection: with Python's own it takes 8 % of the time of short trainings."""
_starting = Lock()
"""Two threads of a test may want a child at the same time."""
_ACTIVE = {"runner.__main__", "runner.child.compiling"}


def begin():
    """Starts it, unless it runs; it ends with this process. Returns its address."""
    server = forkserver._forkserver
    with _starting:
        if server._forkserver_address is None:
            CONTEXT.set_forkserver_preload(_preloaded())
            with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):  # where ``children`` is
                # Its training takes nothing from the test that happens to start it.
                for name in [name for name in os.environ if name.startswith(("MLFLOW_", "RUNNER_"))]:
                    del os.environ[name]
                forkserver.ensure_running()
    return server._forkserver_address


def join(address):
    """Lets the children of this process be copies of one that another has started."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # every child gets it; nothing hangs on it here
    server.ensure_running = lambda: None


def _preloaded():
    return [
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "mlflow.store.tracking.sqlalchemy_workspace_store",
        "safetensors.torch",
        "typer",
        "optuna.importance",
        "optuna.storages._rdb.models",
        "jinja2",
        "matplotlib.pyplot",
        "sklearn.datasets",
        # Before their own would be: settings take the longer the more modules there are, because their descriptions are
        # looked up in the source.
        # What does more than define something when it is imported is left out.
        *({each.name for each in pkgutil.walk_packages(runner.__path__, "runner.")} - _ACTIVE),
        *{entry.module for entry in entry_points(group="runner.plugins")},
        "children",
        "warm",
    ]
