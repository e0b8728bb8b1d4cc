"""The verb ``evaluate``: what a run has learnt, measured once more."""

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

if TYPE_CHECKING:
    from runner.plugin.faces import SourceConfig
    from runner.system.console import Console
    from runner.train.evaluate import Evaluation

Checkpoint = Annotated[Literal["best", "last"], Option(help="The one with the best objective, or the last one.")]
Size = Annotated[
    int | None,
    Option(min=1, metavar="N", help="How much to evaluate, where its data can tell."),
]
Seed = Annotated[int | None, Option(min=0, help="Evaluate other data than the run did, where a seed draws them.")]
Render = Annotated[Path | None, Option(metavar="FILE", help="Draw the evaluation, where its data can be drawn.")]


def evaluate(
    run: Run = "latest", bare: Bare = None, checkpoint: Checkpoint = "best", size: Size = None, seed: Seed = None,
    render: Render = None, sets: Sets = None, plugin: Plugins = None, quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Evaluate what a run has learnt, with the stages that it was trained with.

    On a CPU the digits are those of the run's own evaluation, which are shown beside them. 'latest' is the newest run.

    [bold]runner evaluate[/]

    [bold]runner evaluate marl_phase2-3f2a91c0 --size 1000 --seed 7[/]

    [bold]runner evaluate 3f2a91c0 --render flights.gif[/]
    """
    from runner.system.places import LOCK_NAME
    from runner.tracking.workspace import folder_of

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
    """The assignments that stand for these options."""
    found = []
    for option, value, name in (("--size", size, data.evaluation_size), ("--seed", seed, data.evaluation_seed)):
        if value is not None and name is None:
            raise UsageError(f"'{data.kind}' always evaluates the same data: it has no setting for {option}")
        if value is not None:
            found.append(f"data.{name}={json.dumps(value)}")
    return found


def _show(evaluation: "Evaluation", headline: Sequence[str], unit: str, console: "Console") -> None:
    """Prints the metrics, the headline first, each beside what the run measured there itself."""
    from rich.table import Table

    metrics, recorded = evaluation.metrics, evaluation.recorded or {}
    place = f"{Path(evaluation.checkpoint).name}, at {evaluation.step:,} {unit}"
    table = Table(box=None, pad_edge=False)
    for title in ("", "now", "the run")[: 3 if recorded else 2]:
        table.add_column(title, justify="right" if title else "left", overflow="fold")
    for name in [*(name for name in headline if name in metrics), *sorted(metrics.keys() - set(headline))]:
        values = [each.get(name) for each in (metrics, recorded) if each]
        table.add_row(name, *("-" if value is None else figure(value) for value in values))
    said = [f"{evaluation.seconds:.1f} s"]
    if evaluation.picture is not None:
        said.append(f"drawn into {evaluation.picture}")
    if evaluation.same_digits is not None:
        said.insert(0, f"{'' if evaluation.same_digits else 'not '}the digits of the run's own evaluation")
    print_wrapped(f"{evaluation.run_name}: {place}", console)
    console.print(table)
    print_wrapped("; ".join(said), console)
