"""Commands on several processes, which torch's launcher starts."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

from typer import Exit, Option

from runner.cli.results import results
from runner.distributed.membership import current, is_member
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.tracking import RunFolder

Processes = Annotated[
    int,
    Option("--nproc", min=1, help="Number of processes on this machine that train together."),
]
Nodes = Annotated[
    int,
    Option("--nodes", min=1, help="Number of machines that train together; each runs this command."),
]
Rendezvous = Annotated[
    str,
    Option(
        "--rendezvous",
        metavar="HOST:PORT",
        help="With --nodes, a free port of one machine, where all find each other.",
    ),
]
Value = TypeVar("Value")
VERBS = frozenset({"run", "resume", "verify"})
"""Commands that several processes can run together."""
_OPTIONS = ("--nproc", "--nodes", "--rendezvous")
_ADDRESS = re.compile(r"[^\s/]+:\d{1,5}")


@contextmanager
def membership(words: Sequence[str]) -> Iterator[Callable[[int], None]]:
    """Makes this process a member of its group inside the ``with``, if a launcher has started it.

    A context, because a function that calls the command would be in every traceback.

    Args:
        words: The command line.

    Yields:
        A function that takes the exit code of the command.

    Raises:
        UsageError: Several processes cannot run the command.
    """
    is_launched = is_member(os.environ)
    if is_launched or any(word.partition("=")[0] in _OPTIONS for word in words):
        # A lost connection has one message of ours. Torch reads this when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not is_launched:
        yield _ignore
        return
    from runner.distributed.membership import joined, record_exit

    with joined() as group:
        verb = words[0] if words else ""
        if verb not in VERBS:
            verbs = ", ".join(sorted(VERBS))
            raise UsageError(f"'{verb}' is a command for one process; several can: {verbs}")
        yield partial(record_exit, group)


def _ignore(code: int) -> None:
    """Takes an exit code that no other process waits for."""


def start_processes(recipe: "Recipe", count: int, nodes: int = 1, rendezvous: str = "") -> None:
    """Starts this command in several processes, unless it is one of them already.

    Args:
        recipe: The recipe that they train.
        count: Number of processes on this machine.
        nodes: Number of machines.
        rendezvous: Address at which several machines find each other.

    Raises:
        UsageError: Several processes cannot train the recipe, another number was started, or the
            address is missing.
    """
    total = count * nodes
    group = current()
    if group is not None:
        if total not in (1, group.count):
            raise UsageError(f"--nproc: {total}, and the launcher has started {group.count}")
        return
    if nodes > 1 and not _ADDRESS.fullmatch(rendezvous):
        raise UsageError(f"--nodes: {nodes} machines need --rendezvous HOST:PORT, a free port of one of them")
    if total == 1:
        return
    from runner.distributed import launch
    from runner.distributed.refusals import refuse_recipe

    refuse_recipe(recipe, total)
    machines = launch.Nodes(nodes, rendezvous) if nodes > 1 else None
    with results.inherited():
        code = launch.launch(count, _words(), machines)
    raise Exit(code)


def first_decides(make: Callable[[], Value]) -> Value:
    """Returns what this process makes, or the first one of several."""
    group = current()
    return make() if group is None else group.decide(make)


def follow(recipe: "Recipe", registry: "Registry", folder: "RunFolder | None" = None) -> None:
    """Trains as one of several processes and exits, unless this is the first or the only one."""
    group = current()
    if group is None or not group.rank:
        return
    from runner.training.member import follow_training

    raise Exit(follow_training(recipe, registry, group, folder))


def refuse_several(option: str) -> NoReturn:
    """Raises the UsageError about an option that is for one process."""
    raise UsageError(f"{option} is for one process; leave --nproc out")


def is_one_of_several(count: int) -> bool:
    """Returns whether a command with this --nproc is run by several processes."""
    return count > 1 or current() is not None


def _words() -> list[str]:
    """Returns the command line without the numbers of processes and machines."""
    words: list[str] = []
    is_value = False
    for word in sys.argv[1:]:
        if is_value:
            is_value = False
        elif word in _OPTIONS:
            is_value = True
        elif word.partition("=")[0] not in _OPTIONS:
            words.append(word)
    return words
