"""The command ``profile``: measures the parts of updates."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    RecipeName,
    Sets,
    load_recipe,
    output,
    settings,
    sharing_processor,
    working,
)
from runner.system.errors import ExitCode

if TYPE_CHECKING:
    from runner.cli.live import LiveBar
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe

ProfilesMemory = Annotated[bool, Option("--memory", help="Show which slots and modules use the memory at its peak.")]
Profiled = Annotated[int, Option(min=1, max=1000, help="Number of profiled updates.")]
Warmup = Annotated[
    float,
    Option(min=0, metavar="SECONDS", help="Longest wait for steady updates after compilation."),
]
TraceFolder = Annotated[
    Path | None, Option(metavar="FOLDER", help="Folder for the trace; by default in the workspace.")
]


def profile(
    recipe: RecipeName,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    updates: Profiled = 5,
    warmup: Warmup = 60.0,
    memory: ProfilesMemory = False,
    out: TraceFolder = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Profile updates: time by slot, operators and kernels, host syncs.

    A few steady updates are profiled, and timed without the profiler as well. Their Chrome trace is in
    [bold].runner/profiles[/], or in the folder of --out.

    With --memory, the memory of an update is profiled by slot and module, with a plot over the update.

    [bold]runner profile marl_phase2[/]

    [bold]runner profile graf --memory[/]

    [bold]runner profile marl_baseline data.followers=1 --updates 20 --json[/]
    """
    with working("profile", "reading the recipe", quiet) as bar:
        loaded, registry = load_recipe("profile", recipe, settings(sets, bare), plugin)
        if memory:
            _profile_memory(loaded, registry, out, updates, bar, as_json)
        with bar.phase(f"profiling {loaded.name}"):
            from runner.ablation.profile import profile as measure
            from runner.ablation.profile import show
            from runner.tracking import Workspace

            with sharing_processor(loaded):
                result = measure(loaded, registry, Workspace(), out, updates, warmup)
    output(as_json, result.data, show, result)


def _profile_memory(
    recipe: "Recipe",
    registry: "Registry",
    out: Path | None,
    updates: int,
    bar: "LiveBar",
    as_json: bool,
) -> None:
    """Profiles the memory of updates, and ends the command."""
    with bar.phase(f"profiling the memory of {recipe.name}"):
        from runner.ablation.memory_profile import profile_memory, show
        from runner.tracking import Workspace

        with sharing_processor(recipe):
            result = profile_memory(recipe, registry, Workspace(), out, updates)
    output(as_json, result.data, show, result)
    raise Exit(ExitCode.DONE)
