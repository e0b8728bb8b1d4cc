"""The implementation of ``runner run --seeds`` and ``--folds``, and their output."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rich import box
from rich.table import Table
from typer import Exit

from runner.cli.common import output
from runner.cli.progress import ProgressDisplay
from runner.system.console import CleanText, Console
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import figure, print_wrapped

if TYPE_CHECKING:
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.training.seeds import SeedsResult


class SeedsProgressDisplay(ProgressDisplay):
    """Shows the progress of several trainings as one, with the step of each seed that is training."""

    def __init__(self, console: Console, recipe: "Recipe", count: int, word: str = "seed") -> None:
        super().__init__(console, recipe)
        self.total = recipe.length[1] * count
        self.word = word
        self.steps: Mapping[int, int | None] = {}

    def show_seeds(self, steps: "Mapping[int, int | None]") -> None:
        """Takes note of the seeds that are training; the thread shows them."""
        self.steps = steps

    def doing(self, progressed: float = 0.0) -> str:
        """Returns the phase, and what every seed that is training has reached."""
        seeds = [
            f"{self.word} {seed} is starting" if step is None else f"{self.word} {seed} at {step:,}"
            for seed, step in self.steps.items()
        ]
        return ": ".join(filter(None, (super().doing(progressed), ", ".join(seeds))))


def run_seeds(
    recipes: "Mapping[int, Recipe]",
    registry: "Registry",
    parallel: int,
    go_on: bool,
    tags: "Mapping[str, str]",
    note: str,
    again: str,
    quiet: bool,
    as_json: bool,
    takeover: bool,
    option: Literal["seeds", "folds"] = "seeds",
    allow_drift: bool = False,
) -> NoReturn:
    """Trains a recipe with several seeds or folds, shows their progress and result, and exits."""
    recipe = next(iter(recipes.values()))
    word = option.removesuffix("s")
    with SeedsProgressDisplay(Console(stderr=True, quiet=quiet), recipe, len(recipes), word) as display:
        from runner.tracking import Workspace
        from runner.training.seeds import FOLD, train_seeds

        with display.phase("training"):
            result = train_seeds(
                recipes,
                registry,
                Workspace(),
                display,
                parallel,
                go_on,
                tags,
                note,
                again,
                takeover,
                option,
                ("seed",) if option == "seeds" else (FOLD,),
                allow_drift,
            )
    output(as_json, result.data, show, result, recipe.headline, again, word)
    raise Exit(result.exit_code)


def show(result: "SeedsResult", headline: Sequence[str], again: str, word: str, console: Console) -> None:
    """Prints the mean of every metric with its interval, and the values of all runs if they fit."""
    from runner.tracking.listing import headed

    names = [name for name in headline if name in result.means]
    names += sorted(result.means.keys() - set(headline))
    console.print(headed(result.name, result.status).append(f", {len(result.runs)} {word}s"))
    if result.synthetic:
        print_wrapped(f"data {SYNTHETIC_REMARK}", console, style="yellow")
    seeds = list(result.runs)
    # The first table that fits: the values of all seeds contain the smallest and the largest.
    tables = [
        _table(result, names, seeds, word, extremes=True),
        _table(result, names, seeds, word, extremes=False),
        _table(result, names, [], word, extremes=True),
        _table(result, names, [], word, extremes=False),
    ]
    if names:
        endless = console.options.update(width=10_000)
        fitting = (table for table in tables if console.measure(table, options=endless).maximum <= console.width)
        console.print(next(fitting, tables[-1]))
    else:
        console.print(CleanText("not all were evaluated at the same step", style="dim"))
    for step in sorted(set(result.steps.values())):
        metrics = ", ".join(name for name in names if result.steps[name] == step)
        print_wrapped(f"after step {step:,}, the last that all {word}s reached: {metrics}", console)
    for seed, reason in result.failures.items():
        print_wrapped(f"{word} {seed}: {reason}", console, style="red")
    next_command = again
    if result.status == "FINISHED":
        next_command = f"runner compare OTHER_GROUP {result.name}"
    if result.predictions is not None:
        print_wrapped(f"predictions in {result.predictions}", console)
    print_wrapped(f"kept in {result.folder}", console)
    print_wrapped(f"next: {next_command}", console)


def _table(result: "SeedsResult", names: Sequence[str], seeds: Sequence[int], word: str, *, extremes: bool) -> Table:
    """Returns a table of the means, of their smallest and largest value, and of the values of these runs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    titles = ["metric", "mean [95 %]"]
    if extremes:
        titles.append("min to max")
    titles += [f"{word} {seed}" for seed in seeds]
    for title in titles:
        table.add_column(title, no_wrap=True)

    for name in names:
        mean = result.means[name]
        values = result.values[name]
        cells = [name, f"{figure(mean.mean)} [{figure(mean.low)}, {figure(mean.high)}]"]
        if extremes:
            cells.append(_extremes(values.values()))
        cells += [figure(values[seed]) for seed in seeds]
        table.add_row(*cells)
    return table


def _extremes(values: "Collection[float]") -> str:
    """Returns the smallest and the largest value."""
    if any(map(math.isnan, values)):
        return figure(math.nan)
    return f"{figure(min(values))} to {figure(max(values))}"


def show_comparison(compared: "Mapping[str, Any]", console: Console) -> None:
    """Prints the means of two groups, and whether they differ."""
    first_group, second_group = compared["groups"]
    if compared["synthetic"]:
        print_wrapped(f"{', '.join(compared['synthetic'])}: data {SYNTHETIC_REMARK}", console, style="yellow")
    word = compared["kind"]
    pairing = f"paired by {word.removesuffix('s')}" if compared["paired"] else f"with other {word}"
    print_wrapped(f"{first_group} and {second_group}, {pairing}", console)
    for group, members in compared["left_out"].items():
        numbers = ", ".join(map(str, members))
        reason = "not finished here or in the other group"
        print_wrapped(f"{group}: without {word} {numbers}, {reason}", console, style="yellow")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("metric", "first", "second", "difference [95 %]", "", "second larger"):
        table.add_column(title, no_wrap=title != "second larger")
    for name, row in compared["metrics"].items():
        first, second = (figure(fmean(values.values())) for values in row["values"])
        mean, low, high = row["difference"].values()
        verdict = "differ" if low > 0 or high < 0 else "not clear"
        larger = _count_larger(*row["values"]) if compared["paired"] else "-"
        table.add_row(name, first, second, f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]", verdict, larger)
    console.print(table)


def _count_larger(baseline: "Mapping[int, float]", candidate: "Mapping[int, float]") -> str:
    """Returns in how many pairs the second value is larger."""
    count = sum(candidate[key] > value for key, value in baseline.items())
    return f"{count} of {len(baseline)}"
