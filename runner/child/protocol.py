"""A child process as it sees itself: what it is to do, and messages to and from its parent.

Messages travel on a private socket, so that output of a library is never mistaken for an answer;
recipes with their secrets travel there too, and are never in a file. When the parent ends, for
whatever reason, the socket closes, and the child ends with all processes that it has started.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.errors import (
    OUT_OF_MEMORY,
    MemoryShortageError,
    PluginError,
    RunnerError,
    print_traceback,
)
from runner.system.files import guard, open_file
from runner.system.secrets import register
from runner.system.terminal import print_error
from runner.system.workspace_paths import workspace_root

if TYPE_CHECKING:
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe

_END_SECONDS = 5.0  # for a child that waits for a command, to end by itself when there will be none


class Parent:
    """The process that has started this one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        order = connection.recv()
        register(*order["secrets"])
        guard(workspace_root())
        self._recipe: dict[str, Any] = order["recipe"]
        # The order's options, in addition to the recipe.
        self.options: Mapping[str, Any] = order["options"]
        self.folder: Path = order["folder"]  # ends with this process
        self.plugin_files: list[Path] = order["plugin_files"]
        self.gone = False  # whether it has ended
        self._waiting = False
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="runner-parent", daemon=True).start()

    def load(self) -> tuple[Recipe, Registry]:
        """The recipe, and where its plugins come from."""
        from runner.plugin.registry import Registry
        from runner.recipe.loader import from_values

        registry = Registry(self.plugin_files)
        return from_values(**self._recipe, catalog=registry), registry

    def tell(self, **message: Any) -> None:
        """Sends a message."""
        try:
            self._connection.send(message)
        except OSError:
            _end()

    def commands(self) -> Iterator[str]:
        """Yields the commands of the parent until it sends no more."""
        return iter(self._next, None)

    def ask(self, **message: Any) -> Any:
        """Sends a message and waits for the reply."""
        self.tell(**message)
        reply = self._next()
        return _end() if reply is None else reply

    def _next(self) -> Any:
        self._waiting = True
        message = self._messages.get()
        self._waiting = False
        return message

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            self.gone = True
            self._messages.put(None)
            if self._waiting:
                time.sleep(_END_SECONDS)
            _end()


def attend(module: str, connection: Connection, errors: str | None = None) -> None:
    """Runs ``main(parent)`` of a module, and exits with the exit code of the result.

    This process leads its process group, and writes errors to the parent's file; a copy of another
    process sets that up here.
    """
    if errors is not None:
        os.setsid()
        descriptor = open_file(Path(errors), os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # Like in a new process: locks of another kind (tqdm's, in torch's
        # compiler) count as leaked.
        multiprocessing.set_start_method(None, force=True)
    # Measures from here on what other programs take of the processor.
    importlib.import_module("runner.system.contention")
    parent = Parent(connection)
    try:
        importlib.import_module(module).main(parent)
    except BaseException as error:
        from runner.plugin.plugin_errors import mistake

        reported = error if isinstance(error, RunnerError) else mistake(error)
        print_traceback(error)
        if isinstance(error, PluginError) and error.__cause__:
            error = error.__cause__
        if _is_memory_shortage(error):
            print_error(str(error))
            sys.exit(OUT_OF_MEMORY)
        if reported is None:
            # An error in the runner needs its traceback. Output goes to the same file, and the error must be last.
            sys.stdout.flush()
            raise
        print_error(str(reported))
        sys.exit(reported.exit_code)
    finally:
        # No other process ends the processes that this one has started.
        if parent.gone:
            _end()


def _is_memory_shortage(error: BaseException) -> bool:
    """Returns whether memory was exhausted, of the host or of a GPU."""
    # Torch has an exception for GPU memory, none for host memory, and need
    # not be imported to recognise it.
    if isinstance(error, MemoryError | MemoryShortageError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _end() -> None:
    """Ends this process immediately, with all processes that it has started."""
    os.killpg(0, signal.SIGKILL)
