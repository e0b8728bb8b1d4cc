"""The command ``verify``: checks whether stages keep their contracts."""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    OfRun,
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
from runner.cli.processes import (
    Processes,
    is_one_of_several,
    refuse_several,
    start_processes,
)
from runner.distributed.membership import current
from runner.system.errors import ExitCode, UsageError
from runner.verify.options import Options

if TYPE_CHECKING:
    from runner.cli.live import LiveBar
    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.verify.reduced_form import Reduction
    from runner.verify.verification import Verification

StageNames = Annotated[
    list[str] | None,
    Option(
        help="Judge only this stage, or 'all' for all together. Repeatable.",
        autocompletion=completion.stages,
    ),
]
Horizon = Annotated[
    int | None,
    Option(
        "--horizon",
        min=0,
        help="Updates of the long run, however long they take; by default up to 2,040, as many as fit into 15 s. "
        "Errors rarer than one in this many updates may be missed.",
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
Reduced = Annotated[
    bool,
    Option("--reduced", help="Compare a smaller model on smaller batches, for models that take too long as a whole."),
]
Explain = Annotated[bool, Option("--explain", help="Print the checks and what they cost, and run none.")]


def verify(
    recipe: RecipeName,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    stage: StageNames = None,
    updates: Compared = Options.updates,
    horizon: Horizon = None,
    steps: Steps = Options.steps,
    seeds: Seeds = Options.seeds,
    budget: Patience = Options.budget,
    of: OfRun = None,
    nproc: Processes = 1,
    reduced: Reduced = False,
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

    With --nproc, one process is compared with several that have a part of each batch: Close. If
    they draw these parts themselves (simulators), trainings are compared, too: Statistical.

    Exit codes: 0 all pass, 3 a stage fails, 4 inconclusive. The verdict names what the budget does
    not cover. A budget of 0 trains nothing and has no limit.

    With --reduced, the model has fewer and smaller layers, and batches are smaller: errors that
    only occur in the recipe's sizes are not seen.

    [bold]runner verify marl_phase1[/]

    [bold]runner verify marl_phase2 --stage amp --seeds 12[/]

    [bold]runner verify marl_phase3 --explain[/]

    [bold]runner verify grasp_serve --of latest[/]
    """
    assignments = settings(sets, bare)
    if reduced and of is not None:
        raise UsageError("--reduced: a trained model has its size: leave out --of or --reduced")
    if of is not None and is_one_of_several(nproc):
        refuse_several("--of")
    if nproc > 1:
        loaded, _ = load_recipe("verify", recipe, assignments, plugin)
        start_processes(loaded, nproc)
    with working("verify", "reading the recipe", quiet) as bar:
        loaded, registry = load_recipe("verify", recipe, assignments, plugin)
        reduction: Reduction = {}
        if reduced:
            from runner.verify.reduced_form import described
            from runner.verify.reduced_form import reduced as reduced_form

            # Settings of the command line come last, so that they have priority.
            loaded, reduction = reduced_form(
                loaded, lambda smaller: load_recipe("verify", recipe, [*smaller, *assignments], plugin)[0]
            )
            bar.say(f"comparing a reduced form: {described(reduction)}")
        options = Options(updates, steps, seeds, budget, tuple(stage or ()))
        if horizon is not None:
            options = replace(options, horizon=horizon, completes_horizon=True)
        if explain:
            with bar.phase("listing the checks"):
                _explain(loaded, registry, options, as_json)
            return
        bar.name = loaded.name
        if of is None:
            bar.total = budget or None
        with bar.phase(f"verifying {loaded.name}"):
            from runner.verify.verification import show

            group = current()
            if group is not None:
                report = _verify_processes(loaded, registry, options, group, bar.say)
            elif of is None:
                report = _verify_training(loaded, registry, options, bar)
            else:
                report = _verify_inference(loaded, registry, of, stage or (), bar)
            report = replace(report, reduction=reduction)
            if of is None and not reduced:
                _recommend_reduced(report, loaded, bar.say)
    output(as_json, report.data, show, report)
    raise Exit(report.exit_code)


def _recommend_reduced(report: "Verification", recipe: "Recipe", say: Callable[[str], None]) -> None:
    """Names the option for large models where one took more time than there was."""
    from runner.proof.verdict import Outcome
    from runner.verify.reduced_form import smaller_settings

    is_undecided = report.outcome is Outcome.INCONCLUSIVE and report.interrupted is None
    if is_undecided and report.excess and smaller_settings(recipe):
        say("--reduced compares a smaller model, which takes less time")


def _verify_processes(
    recipe: "Recipe",
    registry: "Registry",
    options: Options,
    group: "ProcessGroup",
    say: Callable[[str], None],
) -> "Verification":
    """Compares the training of several processes with that of one; all but the first process end here."""
    from runner.training.group_steps import join_training
    from runner.verify.process_pair import close_stages
    from runner.verify.process_trainings import follow_verification, verify_group

    join_training(recipe, group)
    with sharing_processor(recipe):
        if group.rank:
            follow_verification(recipe, registry, close_stages(recipe, group.count), group)
            raise Exit
        return verify_group(recipe, registry, group, options, say)


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
