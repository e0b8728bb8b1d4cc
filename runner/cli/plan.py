"""The command ``plan``."""

import platform
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from runner.cli.common import AsJson, Bare, Plugins, RecipeName, Sets, load_recipe, output, settings

if TYPE_CHECKING:
    from runner.memory.plan import MemoryPlan
    from runner.recipe.recipe import Recipe
    from runner.system.console import Console

_UPDATES = 1_000
Compiled = Annotated[
    bool,
    Option("--compiled", help="Plan the code that the stage compile generates; takes longer."),
]


def plan(
    recipe: RecipeName,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    compiled: Compiled = False,
    as_json: AsJson = False,
) -> None:
    """Predict the memory of an update, without data and without a GPU.

    It prints the bytes at the peak of an update, by use and by module; and the time of the first
    1,000 updates, if the workspace contains a finished run of the same recipe.

    [bold]runner plan shakespeare_gpt[/]

    [bold]runner plan shakespeare_gpt train.batch_size=64[/]

    [bold]runner plan shakespeare_gpt_phase3 --compiled[/]
    """
    loaded, registry = load_recipe("plan", recipe, settings(sets, bare), plugin)
    from runner.system.garbage import importing

    with importing():
        from runner.training.planning import plan_memory

    memory = plan_memory(loaded, registry.files, compiled=compiled)
    seconds = _seconds_of_updates(loaded)
    output(as_json, lambda: _data(memory, seconds), _show, memory, seconds)


def _data(memory: "MemoryPlan", seconds: float | None) -> dict[str, Any]:
    return {**memory.data(), "seconds_of_1000_updates": seconds}


def _show(memory: "MemoryPlan", seconds: float | None, console: "Console") -> None:
    from runner.system.text_lines import print_wrapped

    for line in memory.lines():
        print_wrapped(line, console)
    if seconds is None:
        time = "unknown: no run of this recipe has finished on this machine"
    else:
        time = f"about {seconds:,.0f} s, measured on this machine"
    print_wrapped(f"time of the first {_UPDATES:,} updates: {time}", console)


def _seconds_of_updates(recipe: "Recipe") -> float | None:
    """Returns the expected time of the first updates, from the newest run of the same recipe here."""
    from runner.tracking.lookup import folders
    from runner.tracking.workspace import Workspace

    for folder in reversed(folders(Workspace().runs)):
        record = folder.record()
        # Speeds of other machines do not apply to this one.
        if record is None or record.digest != recipe.digest or record.owner.host != platform.node():
            continue
        update_ms = record.metrics.get("perf/update_ms")
        if update_ms is not None:
            first = record.metrics.get("perf/first_update_seconds", update_ms / 1e3)
            return first + (_UPDATES - 1) * update_ms / 1e3
    return None
