"""Options and output of the commands that train: ``run`` and ``resume``."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Exit, Option

from runner.cli.common import output, say
from runner.system.errors import KEEP_BATCH

if TYPE_CHECKING:
    from runner.cli.progress import ProgressDisplay
    from runner.recipe.lock import Drift
    from runner.recipe.recipe import Recipe
    from runner.training.result import RunResult

AllowDrift = Annotated[bool, Option("--allow-drift", help="Resume although recipe, code or packages have changed.")]
Takeover = Annotated[
    bool,
    Option("--takeover", help="Take the run over from another machine, where it must have stopped."),
]
Retune = Annotated[
    bool,
    Option(
        "--retune",
        help="Search again for tuning choices, instead of taking over those of the lock.",
    ),
]
KeepBatch = Annotated[bool, Option("--keep-batch", help="Write the batch to a file if an update runs out of memory.")]


def display_of(recipe: "Recipe", quiet: bool, keep_batch: bool, step: int = 0) -> "ProgressDisplay":
    """Returns the progress display of a training from a step on."""
    from runner.cli.progress import ProgressDisplay
    from runner.system.console import Console

    # A variable, because the place that writes the batch is far inside the training.
    if keep_batch:
        os.environ[KEEP_BATCH] = "1"
    return ProgressDisplay(Console(stderr=True, quiet=quiet), recipe, step)


def end(result: "RunResult", recipe: "Recipe", as_json: bool) -> NoReturn:
    """Prints the result of a training, and exits."""
    from runner.cli.closing_table import show

    output(as_json, result.data, show, result, recipe.headline)
    raise Exit(result.exit_code)


def say_drift(changes: "Sequence[Drift]") -> None:
    """Prints the changes since a lock was written."""
    for change in changes:
        say(f"drift: {change}")
