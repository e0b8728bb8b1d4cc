"""The command ``evaluate``: measures the model of a run again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
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
from runner.cli.runs import Run
from runner.system.errors import UsageError
from runner.system.lines import figure, print_wrapped
from runner.system.synthetic import SYNTHETIC_REMARK

if TYPE_CHECKING:
    from runner.plugin.faces import SourceConfig
    from runner.system.console import Console
    from runner.train.evaluate import Evaluation

Checkpoint = Annotated[
    Literal["best", "last"],
    Option(help="Use the checkpoint with the best objective, or the last one."),
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


def evaluate(
    run: Run = "latest", bare: Bare = None, checkpoint: Checkpoint = "best", size: Size = None, seed: Seed = None,
    render: Render = None, sets: Sets = None, plugin: Plugins = None, quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Evaluate the model of a run, with the stages that it was trained with.

    The evaluation that the run made during its training is printed next to it; on a CPU the digits
    are the same. 'latest' is the newest run.

    [bold]runner evaluate[/]

    [bold]runner evaluate marl_phase2-3f2a91c0 --size 1000 --seed 7[/]

    [bold]runner evaluate 3f2a91c0 --render flights.gif[/]
    """
    from runner.system.places import LOCK_NAME
    from runner.tracking.lookup import folder_of

    run, bare = run_and_settings(run, bare)
    with working("evaluate", "reading the run", quiet) as bar:
        folder, registry, given = folder_of(run), registry_of(plugin), settings(sets, bare)
        lock, command = folder.path / LOCK_NAME, f"runner evaluate {folder.name}"
        recipe, registry, changes = load_lock(lock, given, registry, command)
        if other := _settings(recipe.data, size, seed):
            recipe, registry, changes = load_lock(lock, [*given, *other], registry, command)
        for change in changes:
            if change.matters:
                say(f"drift: {change}")
        with bar.phase(f"evaluating {folder.name}"):
            from runner.recipe.lock import locked_threads
            from runner.train.evaluate import evaluate as evaluated

            with sharing_processor(recipe, locked_threads(lock)):
                evaluation = evaluated(recipe, registry, folder, checkpoint, render)
    output(as_json, evaluation.data, _show, evaluation, recipe.headline, recipe.length[0])


def _settings(data: "SourceConfig", size: int | None, seed: int | None) -> list[str]:
    """Returns assignments with the effect of these options."""
    found = []
    for option, value, name in (
        ("--size", size, data.evaluation_size),
        ("--seed", seed, data.evaluation_seed),
    ):
        if value is not None and name is None:
            raise UsageError(f"{option}: '{data.kind}' has no such setting; it always evaluates the same data")
        if value is not None:
            found.append(f"data.{name}={json.dumps(value)}")
    return found


def _show(evaluation: "Evaluation", headline: Sequence[str], unit: str, console: "Console") -> None:
    """Prints the metrics, the primary ones first, next to the run's values at this checkpoint."""
    from rich.table import Table

    metrics, recorded = evaluation.metrics, evaluation.recorded or {}
    place = f"{Path(evaluation.checkpoint).name}, at {evaluation.step:,} {unit}"
    table = Table(box=None, pad_edge=False)
    for title in ("", "now", "then")[: 3 if recorded else 2]:
        table.add_column(title, justify="right" if title else "left", overflow="fold")
    for name in [
        *(name for name in headline if name in metrics),
        *sorted(metrics.keys() - set(headline)),
    ]:
        values = [each.get(name) for each in (metrics, recorded) if each]
        table.add_row(name, *("-" if value is None else figure(value) for value in values))
    remark = f"Took {evaluation.seconds:.1f} s."
    if evaluation.same_digits is not None:
        relation = "Same digits as" if evaluation.same_digits else "Digits differ from"
        remark = f"{relation} the run's evaluation ({evaluation.seconds:.1f} s)."
    if evaluation.picture is not None:
        remark = f"{remark} Picture: {evaluation.picture}"
    print_wrapped(f"{evaluation.run_name}: {place}", console)
    if evaluation.synthetic:
        print_wrapped(f"data {SYNTHETIC_REMARK}", console)
    console.print(table)
    print_wrapped(remark, console)
