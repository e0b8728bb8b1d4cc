"""The command line in child processes that start in a moment and can be killed at any."""

import gc
import itertools
import json
import logging
import os
import random
import signal
import socket
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from fork_server import CONTEXT, begin

from runner.child import protocol, spawn
from runner.cli import main
from runner.cli.trouble import report
from runner.distributed import launch
from runner.system import faults
from runner.system.errors import UsageError
from runner.system.processes import safe_environment
from runner.system.secrets import register_environment

_NUMBERS = itertools.count()
_PORTS = random.SystemRandom()
_run = launch._run


@dataclass
class Child:
    """One ``runner`` process."""

    process: ForkServerProcess
    out: Path
    err: Path

    def wait(self, timeout=240):
        """Waits for its end; returns its exit code, negative for a signal."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {timeout} s:\n{self.stderr}")
        return self.process.exitcode

    def send(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.join()

    @property
    def running(self):
        return self.process.exitcode is None

    @property
    def stdout(self):
        return self.out.read_text()

    @property
    def stderr(self):
        return self.err.read_text()

    def data(self):
        """What ``--json`` printed."""
        assert self.wait() == 0, self.stderr
        return json.loads(self.stdout)


def start(folder, *arguments, within=None, **variables):
    """Starts ``runner ARGUMENTS``.

    Args:
        folder: where its output goes.
        arguments: the command line.
        within: its working directory; this process's unless told.
        variables: of the environment, beside those of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = next(_NUMBERS)
    out, err = folder / f"{number}.out", folder / f"{number}.err"
    environment = {**os.environ, **variables}
    begin()
    where = str(within or Path.cwd())
    process = CONTEXT.Process(target=_become_runner, args=(list(arguments), where, environment, str(out), str(err)))
    process.start()
    return Child(process, out, err)


def executed(module, connection, errors, threads):
    """In place of ``spawn._executed``, which has tests of its own: a copy of the server instead of an interpreter."""
    environment = safe_environment()
    if threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    begin()
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND)
    with Connection(descriptor, readable=False) as output:  # which is how a descriptor travels to a process
        process = CONTEXT.Process(target=_become_child, args=(str(Path.cwd()), environment, module, connection, output))
        process.start()

    def wait(seconds):
        process.join(seconds)
        return process.exitcode

    return process.pid, wait


def free_port():
    """Returns a port of this machine that nothing listens on.

    The system gives none of these to a program that asks for any port, as it could until the caller listens.
    """
    while True:
        port = _PORTS.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def launched(count, words, nodes):
    """In place of ``launch._run``, which has a test of its own: copies of the server instead of interpreters.

    Machines find each other by torch's launcher alone.
    """
    if nodes is not None:
        return _run(count, words, nodes)
    variables = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begin()
    processes = []
    # Which is how descriptors travel to a process.
    with Connection(os.dup(1), readable=False) as out, Connection(os.dup(2), readable=False) as err:
        for rank in map(str, range(count)):
            environment = {**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank}
            arguments = (list(words), str(Path.cwd()), environment, out, err)
            processes.append(CONTEXT.Process(target=_become_member, args=arguments))
            processes[-1].start()
    for process in processes:
        process.join()
    return {rank: process for rank, process in enumerate(processes) if process.exitcode}, None


def _become_member(arguments, where, environment, out, err):
    _enter(where, environment)
    for descriptor, connection in ((1, out), (2, err)):
        os.dup2(connection.fileno(), descriptor)
    sys.argv = ["runner", *arguments]
    _begin()
    main()


def _become_runner(arguments, where, environment, out, err):
    _enter(where, environment)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["runner", *arguments]
    _begin()
    main()


def _become_child(where, environment, module, connection, output):
    _enter(where, environment)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    _begin()
    protocol.attend(module, connection)


def _begin():
    """Does what importing does in a process that nothing was imported in before."""
    # What it starts itself comes from the same server: one of its own would import everything anew.
    forkserver._forkserver.ensure_running = lambda: None
    spawn.attend = partial(_attend, str(Path.cwd()), dict(os.environ))
    spawn._executed = executed
    launch._run = launched
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nohup had the last one ignored
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # which the runner sees to where it imports MLflow itself
    register_environment()
    if "TRACED_ONLY" in os.environ:
        torch.compile = partial(torch.compile, backend="aot_eager")
    try:
        faults._armed = faults.parse(os.environ.get(faults.VARIABLE, ""))
    except UsageError as error:
        report(error)
        sys.exit(error.exit_code)


def _attend(where, environment, *call):
    _enter(where, environment)
    protocol.attend(*call)


def _enter(where, environment):
    gc.freeze()  # what the server has imported is no garbage: looking through it takes half a second each time
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


@contextmanager
def running(child):
    """Kills the child at the end if it is still there."""
    try:
        yield child
    finally:
        if child.running:
            child.kill()
