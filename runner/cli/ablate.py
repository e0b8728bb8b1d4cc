"""The command ``ablate``: measures the gain of every stage."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    OfRun,
    Plugins,
    Quiet,
    Sets,
    load_recipe,
    output,
    registry_of,
    settings,
    sharing_processor,
    working,
)
from runner.cli.processes import refuse_several
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.cli.live import LiveBar

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
Nproc = Annotated[
    int | None,
    Option("--nproc", min=1, help="Number of processes that train together; replaces the file's."),
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


def ablate(
    experiment: Experiment,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    budget: Budget = None,
    metric: MetricOption = Metric.TIME,
    out: ResultFolder = None,
    fresh: Fresh = False,
    of: OfRun = None,
    nproc: Nproc = None,
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

    With --nproc, every variant trains in several processes, beside the baseline in one; the bytes
    that they send are computed and counted.

    Exit codes: 0 done, 3 the gate failed a variant, 4 this machine is too noisy.

    [bold]runner ablate experiments/marl_phases/marl_phases.yaml[/]

    [bold]runner ablate marl_phase3 data.followers=1 --budget 300[/]

    [bold]runner ablate digits_classifier optimization.compressed_gradients=on --nproc 2[/]

    [bold]runner ablate graf optimization.activation_checkpointing=on --metric memory[/]
    """
    with working("ablate", "starting", quiet) as bar:
        if of is not None and metric is Metric.MEMORY:
            raise UsageError("--metric memory measures updates, which a trained model does not make; remove --of")
        if nproc is not None and (of is not None or metric is Metric.MEMORY):
            option = "--of" if of is not None else "--metric memory"
            refuse_several(option)
        if metric is Metric.MEMORY:
            _ablate_memory(experiment, settings(sets, bare), plugin, budget, out, fresh, bar, as_json)
        if of is not None:
            _ablate_inference(experiment, settings(sets, bare), plugin, budget, out, of, bar, as_json)
        from runner.ablation.ablate import ablate as measure
        from runner.ablation.experiment import load_experiment
        from runner.ablation.report import show
        from runner.tracking import Workspace
        from runner.verify.group_gate import GroupGate
        from runner.verify.timed_gate import TimedGate

        registry = registry_of(plugin)
        loaded = load_experiment(experiment, settings(sets, bare), registry, budget, nproc)
        bar.name = loaded.config.name
        bar.total = loaded.config.budget
        command = shlex.join(["runner", *sys.argv[1:]])
        with TimedGate() as gate:
            processes = loaded.config.processes
            judge = gate if processes == 1 else GroupGate(processes)
            done = measure(loaded, registry, Workspace(), out, fresh, command, judge, bar)
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
