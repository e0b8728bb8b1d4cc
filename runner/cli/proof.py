"""Commands that prove and measure: ``verify``, ``ablate`` and ``profile``."""

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
    Option(
        help="Judge only this stage, or 'all' for all together. Repeatable.",
        autocompletion=completion.stages,
    ),
]
Horizon = Annotated[
    int,
    Option(
        "--horizon",
        min=0,
        help="Updates of the long run; errors rarer than one in this many updates may be missed.",
    ),
]
Compared = Annotated[int, Option(min=2, help="Compared updates for Exact and Close stages.")]
Steps = Annotated[
    int | None,
    Option(
        min=1,
        help="Length of a training for Statistical stages; by default, as much of the recipe's as the budget allows.",
    ),
]
Seeds = Annotated[int, Option(min=8, help="Largest number of pairs of trainings for a stage.")]
Patience = Annotated[float, Option(min=0, metavar="SECONDS", help="Time budget of the verification.")]
Of = Annotated[
    str | None,
    Option(
        "--of",
        metavar="RUN",
        help="Use the recipe's inference section, with the model of this run.",
    ),
]
Explain = Annotated[bool, Option("--explain", help="Print the checks and what they cost, and run none.")]
Experiment = Annotated[
    str,
    Argument(
        metavar="EXPERIMENT|RECIPE",
        help="File of kind ablation, recipe file, or name of a recipe that ships.",
        autocompletion=completion.recipes,
    ),
]
Budget = Annotated[
    float | None,
    Option(min=1.0, metavar="SECONDS", help="Time budget of the ablation; replaces the file's."),
]
ResultFolder = Annotated[
    Path | None,
    Option(metavar="FOLDER", help="Folder for the result; by default in the workspace."),
]
Fresh = Annotated[
    bool,
    Option("--fresh", help="Start from the beginning instead of continuing an interrupted ablation."),
]


class Metric(StrEnum):
    """The quantity that an ablation measures."""

    TIME = "time"
    MEMORY = "memory"


MetricOption = Annotated[Metric, Option("--metric", help="The quantity to measure: time or memory of an update.")]
ProfilesMemory = Annotated[bool, Option("--memory", help="Show which slots and modules use the memory at its peak.")]
Profiled = Annotated[int, Option(min=1, max=1000, help="Number of profiled updates.")]
Warmup = Annotated[
    float,
    Option(min=0, metavar="SECONDS", help="Longest wait for steady updates after compilation."),
]
TraceFolder = Annotated[
    Path | None, Option(metavar="FOLDER", help="Folder for the trace; by default in the workspace.")
]


def verify(
    recipe: RecipeName,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    stage: StageNames = None,
    updates: Compared = Options.updates,
    horizon: Horizon = Options.horizon,
    steps: Steps = Options.steps,
    seeds: Seeds = Options.seeds,
    budget: Patience = Options.budget,
    of: Of = None,
    explain: Explain = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check whether the stages of a recipe keep their contracts, each stage alone and all together.

    Exact: the same bits as without the stage. Close: the same algebra in float64, and in float32 no
    more rounding than the baseline has. Statistical: trainings with paired seeds, until it is clear
    that the objective is not worse by more than the margin.

    With --of, the stages of the recipe's inference section are judged: the answers and the
    objective of a run's model.

    Exit codes: 0 all pass, 3 a stage fails, 4 inconclusive. The verdict names what the budget does
    not cover. A budget of 0 trains nothing and has no limit.

    [bold]runner verify marl_phase1[/]

    [bold]runner verify marl_phase2 --stage amp --seeds 12[/]

    [bold]runner verify marl_phase3 --explain[/]

    [bold]runner verify grasp_serve --of latest[/]
    """
    with working("verify", "reading the recipe", quiet) as bar:
        loaded, registry = load_recipe("verify", recipe, settings(sets, bare), plugin)
        options = Options(updates, steps, seeds, budget, tuple(stage or ()), horizon)
        if explain:
            with bar.phase("listing the checks"):
                _explain(loaded, registry, options, as_json)
            return
        bar.name = loaded.name
        if of is None:
            bar.total = budget or None
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
    from runner.training.budget import fitted
    from runner.verify.gate import verify_recipe
    from runner.verify.time_limit import Interrupted, interruptible

    recipe = fitted(recipe, registry, bar.say)
    try:
        # Trainings in child processes end, too, and verdicts that were reached are printed.
        with interruptible(), sharing_processor(recipe):
            return verify_recipe(recipe, registry, options, bar.say, bar.phase)
    except Interrupted as interruption:
        raise Exit(interruption.exit_code) from None


def _verify_inference(
    recipe: "Recipe", registry: "Registry", run: str, stages: Sequence[str], bar: "LiveBar"
) -> "Verification":
    """Verifies the stages of a recipe's inference section on the model of a run, and records a complete result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    from runner.training.model_versions import record_verification, require_place_for_verification
    from runner.training.trained_run import trained
    from runner.verify.inference_gate import verify_inference

    model = trained(run, plugins=registry.files).under(recipe)
    if not stages:
        require_place_for_verification(run, model)
    with sharing_processor(recipe):
        report = verify_inference(model, stages, bar.say, bar.phase)
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
    experiment: Experiment,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    budget: Budget = None,
    metric: MetricOption = Metric.TIME,
    out: ResultFolder = None,
    fresh: Fresh = False,
    of: Of = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure the speed-up of every stage on this machine.

    Child processes measure alternately: the baseline (twice), each stage alone, each phase, all
    stages, and all stages but one. Variants that do not fit the budget are printed and left out
    before the first round; if none fits, the exit code is 2. The report, with tables, plots and the
    recommended recipe, is in [bold].runner/ablations[/] or in the folder of --out. After an
    interruption, the same command continues.

    With --of, the stages of the recipe's inference section are measured with a run's model: the
    time of an answer, the size of the model and its objective.

    With --metric memory, the peak memory of an update is measured: each stage alone and all together.

    Exit codes: 0 done, 3 the gate failed a variant, 4 this machine is too noisy.

    [bold]runner ablate experiments/marl_phases/marl_phases.yaml[/]

    [bold]runner ablate marl_phase3 data.followers=1 --budget 300[/]

    [bold]runner ablate graf optimization.activation_checkpointing=on --metric memory[/]
    """
    with working("ablate", "starting", quiet) as bar:
        if of is not None and metric is Metric.MEMORY:
            raise UsageError("--metric memory measures updates, which a trained model does not make; remove --of")
        if metric is Metric.MEMORY:
            _ablate_memory(experiment, settings(sets, bare), plugin, budget, out, fresh, bar, as_json)
        if of is not None:
            _ablate_inference(experiment, settings(sets, bare), plugin, budget, out, of, bar, as_json)
        from runner.ablation.ablate import ablate as measure
        from runner.ablation.experiment import load_experiment
        from runner.ablation.report import show
        from runner.tracking import Workspace
        from runner.verify.timed_gate import TimedGate

        registry = registry_of(plugin)
        loaded = load_experiment(experiment, settings(sets, bare), registry, budget)
        bar.name = loaded.config.name
        bar.total = loaded.config.budget
        command = shlex.join(["runner", *sys.argv[1:]])
        with TimedGate() as gate:
            done = measure(loaded, registry, Workspace(), out, fresh, command, gate, bar)
    output(as_json, done.data, show, done)
    raise Exit(done.exit_code)


def _ablate_memory(
    experiment: str,
    sets: list[str],
    plugin: Plugins,
    budget: float | None,
    out: Path | None,
    fresh: bool,
    bar: "LiveBar",
    as_json: bool,
) -> None:
    """Measures the memory of a recipe's stages, and ends the command."""
    from runner.ablation.experiment import load_experiment
    from runner.ablation.memory_ablation import ablate_memory
    from runner.ablation.memory_report import show
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
    recipe: str,
    sets: list[str],
    plugin: Plugins,
    budget: float | None,
    out: Path | None,
    of: str,
    bar: "LiveBar",
    as_json: bool,
) -> None:
    """Measures a recipe's section ``inference``, and ends the command."""
    loaded, registry = load_recipe("ablate", recipe, sets, plugin)
    with bar.phase(f"measuring {loaded.name}"):
        from runner.ablation.inference_ablation import ablate_inference
        from runner.ablation.inference_report import show, write
        from runner.tracking import Workspace
        from runner.training.trained_run import trained

        model = trained(of, plugins=registry.files).under(loaded)
        folder = out or Workspace().ablations / f"{loaded.name}-of-{model.folder.name}"
        with sharing_processor(loaded):
            result = ablate_inference(model, folder, budget or 300.0, bar.say)
        write(result)
    output(as_json, result.data, show, result)
    raise Exit(result.exit_code)


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
