"""The command ``evaluate``: measures the model of a run again."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    Run,
    Sets,
    load_lock,
    output,
    registry_of,
    run_and_settings,
    say,
    settings,
    sharing_processor,
    working,
)
from runner.system.errors import UsageError
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import figure, print_wrapped

if TYPE_CHECKING:
    from rich.table import Table

    from runner.plugin.configs import SourceConfig
    from runner.system.console import Console
    from runner.training.evaluate import Evaluation

Checkpoint = Annotated[
    Literal["best", "last"],
    Option(help="Use the checkpoint with the best objective, or the last one."),
]
DataPart = Annotated[
    Literal["test", "validation"] | None,
    Option(
        "--part",
        help="Part of the data: test, or validation, which selected the best checkpoint. The default is test, "
        "where the data have it.",
    ),
]
Size = Annotated[
    int | None,
    Option(min=1, metavar="N", help="Number of evaluated items, for data that have such a setting."),
]
Seed = Annotated[
    int | None,
    Option(min=0, help="Seed of the evaluated data, for data that are drawn from a seed."),
]
Render = Annotated[
    Path | None,
    Option(metavar="FILE", help="Draw the evaluation to a file, for data that can be drawn."),
]

_UNUSED = {
    "optimizer": "only a training uses it",
    "lr_scheduler": "only a training uses it",
    "inference": "runner verify RECIPE --of RUN compares the model with and without these stages",
    "serve": "runner serve uses it",
    "tracking": "only a training is tracked",
}
"""Sections of a recipe that change nothing in an evaluation, each with who uses it."""
_USED_OF_TRAIN = ("batch_size", "ema")
"""The settings of ``train`` that an evaluation uses; the others describe the training."""


def evaluate(
    run: Run = "latest",
    bare: Bare = None,
    checkpoint: Checkpoint = "best",
    part: DataPart = None,
    size: Size = None,
    seed: Seed = None,
    render: Render = None,
    sets: Sets = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the model of a run, with the stages that it was trained with.

    The model is evaluated on the test part of the data, which has not selected it, or on the validation
    part, where the data have no other. The evaluation that the run made is printed next to it; on a CPU the
    digits are the same. 'latest' is the newest run.

    [bold]runner evaluate[/]

    [bold]runner evaluate marl_phase2-3f2a91c0 --size 1000 --seed 7[/]

    [bold]runner evaluate 3f2a91c0 --render flights.gif[/]
    """
    from runner.system.workspace_paths import LOCK_NAME
    from runner.tracking.lookup import folder_of
    from runner.tracking.workspace import Workspace

    run, bare = run_and_settings(run, bare)
    with working("evaluate", "reading the run", quiet) as bar:
        folder = folder_of(run)
        registry = registry_of(plugin)
        assignments = settings(sets, bare)
        _refuse_unused(assignments)
        lock = folder.path / LOCK_NAME
        # The name of a run is known in its own workspace only.
        is_here = folder.path.parent == Workspace().runs
        command = f"runner evaluate {folder.name if is_here else shlex.quote(run)}"
        recipe, registry, changes = load_lock(lock, assignments, registry, command)
        # The names of these settings depend on the source, which the lock names.
        more_assignments = _settings(recipe.data, size, seed)
        if more_assignments:
            assignments += more_assignments
            recipe, registry, changes = load_lock(lock, assignments, registry, command)
        for change in changes:
            if change.matters:
                say(f"drift: {change}")
        with bar.phase(f"evaluating {folder.name}"):
            from runner.recipe.lock import locked_threads
            from runner.training.evaluate import evaluate as evaluated

            with sharing_processor(recipe, locked_threads(lock)):
                evaluation = evaluated(recipe, registry, folder, checkpoint, render, part)
    output(as_json, evaluation.data, _show, evaluation, recipe.headline, recipe.length[0])


def _refuse_unused(assignments: Sequence[str]) -> None:
    """Raises a UsageError about a setting that changes nothing in an evaluation."""
    for assignment in assignments:
        path = assignment.partition("=")[0].split(".")
        section = path[0]
        if section in _UNUSED:
            raise UsageError(f"{assignment}: an evaluation does not use '{section}'; {_UNUSED[section]}")
        if section == "train" and not (len(path) > 1 and path[1] in _USED_OF_TRAIN):
            used = " and ".join(f"train.{name}" for name in _USED_OF_TRAIN)
            raise UsageError(f"{assignment}: of 'train', an evaluation uses {used} only")


def _settings(data: "SourceConfig", size: int | None, seed: int | None) -> list[str]:
    """Returns assignments with the effect of these options."""
    assignments = []
    for option, value, name in (
        ("--size", size, data.evaluation_size),
        ("--seed", seed, data.evaluation_seed),
    ):
        # Ignoring the option would print a result that looks like another one.
        if value is not None and name is None:
            raise UsageError(f"{option}: '{data.kind}' has no such setting; it always evaluates the same data")
        if value is not None:
            assignments.append(f"data.{name}={json.dumps(value)}")
    return assignments


def _show(evaluation: "Evaluation", headline: Sequence[str], unit: str, console: "Console") -> None:
    """Prints the metrics, the primary ones first, next to the run's values at this checkpoint."""
    table = _table(evaluation, headline)
    remark = f"Took {evaluation.seconds:.1f} s."
    if evaluation.same_digits is not None:
        relation = "Same digits as" if evaluation.same_digits else "Digits differ from"
        what = "test" if evaluation.part == "test" else "evaluation"
        remark = f"{relation} the run's {what} ({evaluation.seconds:.1f} s)."
    if evaluation.picture is not None:
        remark = f"{remark} Picture: {evaluation.picture}"
    checkpoint = f"{Path(evaluation.checkpoint).name}, at {evaluation.step:,} {unit}"
    part = f"{evaluation.part} part"
    if evaluation.part == "validation":
        part += ", which selects the best checkpoint"
    print_wrapped(f"{evaluation.run_name}: {checkpoint}; on the {part}", console)
    if evaluation.synthetic:
        print_wrapped(f"data {SYNTHETIC_REMARK}", console)
    console.print(table)
    print_wrapped(remark, console)


def _table(evaluation: "Evaluation", headline: Sequence[str]) -> "Table":
    """Returns a table of the metrics; without values of the run it has one column less."""
    from rich.table import Table

    columns = {"now": evaluation.metrics}
    if evaluation.recorded:
        columns["then"] = evaluation.recorded
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="left", overflow="fold")
    for title in columns:
        table.add_column(title, justify="right", overflow="fold")

    names = [name for name in headline if name in evaluation.metrics]
    names += sorted(evaluation.metrics.keys() - set(headline))
    for name in names:
        values = [metrics.get(name) for metrics in columns.values()]
        table.add_row(name, *("-" if value is None else figure(value) for value in values))
    return table
