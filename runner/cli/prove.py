"""The verbs that prove: ``verify``, ``ablate`` and ``profile``."""

import shlex
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    RecipeName,
    Sets,
    load_recipe,
    output,
    registry_of,
    settings,
    sharing_processor,
    working,
)
from runner.system.errors import ExitCode, UsageError
from runner.verify.options import Options

if TYPE_CHECKING:
    from runner.cli.live import LiveBar
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.verify.verification import Verification

StageNames = Annotated[
    list[str] | None,
    Option(help="Only this stage, or 'all' for the recipe; may be repeated.", autocompletion=completion.stages),
]
Horizon = Annotated[
    int, Option("--horizon", min=0, help="Updates of a long run, which says how rare an error may be to be missed.")
]
Compared = Annotated[int, Option(min=2, help="Updates that are compared for Exact and Close stages.")]
Steps = Annotated[
    int | None,
    Option(
        min=1, help="Length of a training for Statistical stages; as much of the recipe's as the budget has room for."
    ),
]
Seeds = Annotated[int, Option(min=8, help="The most pairs of trainings for one stage.")]
Patience = Annotated[
    float, Option(min=0, metavar="SECONDS", help="Time for all of it, in which trainings have to fit.")
]
Of = Annotated[
    str | None,
    Option("--of", metavar="RUN", help="Look at the recipe's inference section, on the model of this run."),
]
Explain = Annotated[bool, Option("--explain", help="Print the checks and what they cost, and run none.")]
Experiment = Annotated[
    str,
    Argument(
        metavar="EXPERIMENT|RECIPE",
        help="A file of kind ablation, a recipe, or a recipe that ships.",
        autocompletion=completion.recipes,
    ),
]
Budget = Annotated[float | None, Option(min=1.0, metavar="SECONDS", help="Time for all of it, instead of the file's.")]
ResultFolder = Annotated[Path | None, Option(metavar="FOLDER", help="Where the result goes, instead of the workspace.")]
Fresh = Annotated[bool, Option("--fresh", help="Begin anew, although an interrupted ablation could be continued.")]


class Metric(StrEnum):
    """What an ablation measures."""

    TIME = "time"
    MEMORY = "memory"


MetricOption = Annotated[Metric, Option("--metric", help="Measure the time or the memory of an update.")]
ProfilesMemory = Annotated[
    bool, Option("--memory", help="Show which slots and modules hold the memory at its peak, instead of the time.")
]
Profiled = Annotated[int, Option(min=1, max=1000, help="Updates that are profiled.")]
Warmup = Annotated[float, Option(min=0, metavar="SECONDS", help="Longest wait, once compiled, for steady updates.")]
TraceFolder = Annotated[Path | None, Option(metavar="FOLDER", help="Where the trace goes, instead of the workspace.")]


def verify(
    recipe: RecipeName, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, stage: StageNames = None,
    updates: Compared = Options.updates, horizon: Horizon = Options.horizon, steps: Steps = Options.steps,
    seeds: Seeds = Options.seeds, budget: Patience = Options.budget, of: Of = None, explain: Explain = False,
    quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say whether the stages of a recipe keep what they promise, each alone and all together.

    Exact: the same bits as without. Close: the same algebra in float64, and no more rounding than the baseline in
    float32. Statistical: whole trainings with paired seeds, until it is clear that no more than the margin is lost.
    With --of, the stages are those of the recipe's section inference, and what is compared are the answers of a run's
    model, and its objective.

    The exit code is 0 if all pass, 3 if one fails, 4 if something is not clear. What the budget does not cover is
    named in the verdict; a budget of 0 trains nothing and has no limit.

    [bold]runner verify marl_phase1[/]

    [bold]runner verify marl_phase2 --stage amp --seeds 12[/]

    [bold]runner verify marl_phase3 --explain[/]

    [bold]runner verify digits_served --of latest[/]
    """
    with working("verify", "reading the recipe", quiet) as bar:
        loaded, registry = load_recipe("verify", recipe, settings(sets, bare), plugin)
        options = Options(updates, steps, seeds, budget, tuple(stage or ()), horizon)
        if explain:
            with bar.phase("listing the checks"):
                _explain(loaded, registry, options, as_json)
            return
        with bar.phase(f"verifying {loaded.name}"):
            from runner.verify.verification import show

            if of is None:
                report = _verify_training(loaded, registry, options, bar)
            else:
                report = _verify_inference(loaded, registry, of, stage or (), bar)
    output(as_json, report.data, show, report)
    raise Exit(report.exit_code)


def _verify_training(recipe: "Recipe", registry: "Registry", options: Options, bar: "LiveBar") -> "Verification":
    """Verifies the stages of a training, and those that its memory budget needs."""
    from runner.train.budget import fitted
    from runner.verify.gate import verify_recipe
    from runner.verify.time_limit import Interrupted, interruptible

    recipe = fitted(recipe, registry, bar.say)
    try:
        # Trainings in child processes end, too, and verdicts that were reached are printed.
        with interruptible(), sharing_processor(recipe):
            return verify_recipe(recipe, registry, options, bar.say)
    except Interrupted as interruption:
        raise Exit(interruption.exit_code) from None


def _verify_inference(
    recipe: "Recipe", registry: "Registry", run: str, stages: Sequence[str], bar: "LiveBar"
) -> "Verification":
    """Verifies the stages of a recipe's inference section on the model of a run, and records a complete result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    from runner.inference.gate import verify_inference
    from runner.train.trained import trained
    from runner.train.versions import record_verification, require_place_for_verification

    model = trained(run, plugins=registry.files).under(recipe)
    if not stages:
        require_place_for_verification(run, model)
    with sharing_processor(recipe):
        report = verify_inference(model, stages, bar.say)
    # A verification of some stages is not one of the model.
    if not stages:
        objections = "; ".join(f"{row.name}: {row.summary}" for row in report.rows if row.verdict != "PASS")
        record_verification(run, model, report.outcome, objections)
    return report


def _explain(recipe: "Recipe", registry: "Registry", options: Options, as_json: bool) -> None:
    """Prints the checks of a verification."""
    from runner.verify.explanation import explain, show

    explanation = explain(recipe, registry, options)
    output(as_json, explanation.data, show, explanation)


def ablate(
    experiment: Experiment, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, budget: Budget = None,
    metric: MetricOption = Metric.TIME, out: ResultFolder = None, fresh: Fresh = False, of: Of = None,
    quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure what every stage is worth on this machine.

    The baseline (twice), each stage alone, each phase, all, and all but each run in child processes that take turns.
    What does not fit into the budget is said and left out before the first round; if nothing does, the exit code is 2.
    The report, with tables, plots and the recipe to use, is in [bold].runner/ablations[/]; --out names another folder.
    Given again after an interruption, the same command goes on.
    With --of, the stages of the recipe's section inference are measured, on a run's model: how long an answer takes,
    how many bytes it has, and what becomes of its objective.
    With --metric memory, it measures what an update holds at its peak: each stage alone and all together.

    Exit codes: 0 done, 3 the gate failed a variant, 4 this machine is too noisy to tell.

    [bold]runner ablate experiments/marl_phases/marl_phases.yaml[/]

    [bold]runner ablate marl_phase3 data.followers=1 --budget 300[/]

    [bold]runner ablate graf optimization.activation_checkpointing=on --metric memory[/]
    """
    with working("ablate", "starting", quiet) as bar:
        if of is not None and metric is Metric.MEMORY:
            raise UsageError("--metric memory measures updates, and a run's model makes none; remove --of")
        if metric is Metric.MEMORY:
            _ablate_memory(experiment, settings(sets, bare), plugin, budget, out, fresh, bar, as_json)
        if of is not None:
            _ablate_inference(experiment, settings(sets, bare), plugin, budget, out, of, bar, as_json)
        from runner.measure.ablate import ablate as measure
        from runner.measure.experiment import load_experiment
        from runner.measure.report import show
        from runner.tracking import Workspace
        from runner.verify.timed_gate import TimedGate

        registry = registry_of(plugin)
        loaded = load_experiment(experiment, settings(sets, bare), registry, budget)
        bar.name, bar.total = loaded.config.name, loaded.config.budget
        command = shlex.join(["runner", *sys.argv[1:]])
        with TimedGate() as gate:
            done = measure(loaded, registry, Workspace(), out, fresh, command, gate, bar)
    output(as_json, done.data, show, done)
    raise Exit(done.exit_code)


def _ablate_memory(
    experiment: str, sets: list[str], plugin: Plugins, budget: float | None, out: Path | None, fresh: bool,
    bar: "LiveBar", as_json: bool,
) -> None:  # fmt: skip
    """Measures the memory of a recipe's stages, and ends the command."""
    from runner.measure.experiment import load_experiment
    from runner.measure.memory_ablation import ablate_memory
    from runner.measure.memory_report import show
    from runner.tracking import Workspace

    registry = registry_of(plugin)
    loaded = load_experiment(experiment, sets, registry, budget)
    bar.name = loaded.config.name
    bar.total = loaded.config.budget
    command = shlex.join(["runner", *sys.argv[1:]])
    result = ablate_memory(loaded, registry, Workspace(), out, fresh, command, bar)
    output(as_json, result.data, show, result)
    raise Exit(result.exit_code)


def _ablate_inference(
    recipe: str, sets: list[str], plugin: Plugins, budget: float | None, out: Path | None, of: str, bar: "LiveBar",
    as_json: bool,
) -> None:  # fmt: skip
    """Measures a recipe's section ``inference``, and ends the command."""
    loaded, registry = load_recipe("ablate", recipe, sets, plugin)
    with bar.phase(f"measuring {loaded.name}"):
        from runner.inference.ablate import ablate_inference
        from runner.inference.report import show, write
        from runner.tracking import Workspace
        from runner.train.trained import trained

        found = trained(of, plugins=registry.files).under(loaded)
        folder = out or Workspace().ablations / f"{loaded.name}-of-{found.folder.name}"
        with sharing_processor(loaded):
            result = ablate_inference(found, folder, budget or 300.0, bar.say)
        write(result)
    output(as_json, result.data, show, result)
    raise Exit(result.exit_code)


def profile(
    recipe: RecipeName, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, updates: Profiled = 5,
    warmup: Warmup = 60.0, memory: ProfilesMemory = False, out: TraceFolder = None, quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say where the time of an update goes: slots, operators and kernels, host syncs.

    A few updates are profiled once they are steady, and timed without the profiler, too. Their Chrome trace is in
    [bold].runner/profiles[/]; --out names another folder.
    With --memory, it shows where the memory of an update goes: slots, modules, and a plot over the update.

    [bold]runner profile marl_phase2[/]

    [bold]runner profile graf --memory[/]

    [bold]runner profile marl_baseline data.followers=1 --updates 20 --json[/]
    """
    with working("profile", "reading the recipe", quiet) as bar:
        loaded, registry = load_recipe("profile", recipe, settings(sets, bare), plugin)
        if memory:
            _profile_memory(loaded, registry, out, updates, bar, as_json)
        with bar.phase(f"profiling {loaded.name}"):
            from runner.measure.profile import profile as measure
            from runner.measure.profile import show
            from runner.tracking import Workspace

            with sharing_processor(loaded):
                result = measure(loaded, registry, Workspace(), out, updates, warmup)
    output(as_json, result.data, show, result)


def _profile_memory(
    recipe: "Recipe", registry: "Registry", out: Path | None, updates: int, bar: "LiveBar", as_json: bool
) -> None:
    """Profiles the memory of updates, and ends the command."""
    with bar.phase(f"profiling the memory of {recipe.name}"):
        from runner.measure.memory_profile import profile_memory, show
        from runner.tracking import Workspace

        with sharing_processor(recipe):
            result = profile_memory(recipe, registry, Workspace(), out, updates)
    output(as_json, result.data, show, result)
    raise Exit(ExitCode.DONE)
