"""The implementation of ``runner run`` with several values of settings, and its output."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from typer import Exit

from runner.cli.common import output
from runner.cli.seeds import SeedsProgressDisplay
from runner.recipe.dumping import dump_inline
from runner.system.console import Console
from runner.system.errors import UsageError
from runner.system.text_lines import figure, print_wrapped

if TYPE_CHECKING:
    from runner.plugin.contract import Objective
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.training.seeds import SeedsResult


@dataclass(frozen=True)
class Grid:
    """The result of a grid, and the settings in which its runs differ.

    Attributes:
        result: The result of the group, by the number of a run.
        settings: The values of a run by dotted path, by its number.
    """

    result: "SeedsResult"
    settings: Mapping[int, Mapping[str, Any]]

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        data = self.result.data()
        # A grid has no means, because its runs are not repetitions.
        del data["means"]
        return {**data, "settings": self.settings}

    def best(self, objective: "Objective | None") -> int | None:
        """Returns the number of the finished run whose last evaluation is best; None if that is not clear."""
        values = self.result.values.get(objective.name, {}) if objective is not None else {}
        finite = {
            number: value
            for number, value in values.items()
            if math.isfinite(value) and number not in self.result.unfinished
        }
        if objective is None or not finite or len(values) < 2:
            return None
        choose = max if objective.direction == "maximize" else min
        best = choose(finite, key=lambda number: finite[number])
        return best if list(finite.values()).count(finite[best]) == 1 else None

    def rows(self, headline: Sequence[str]) -> list[dict[str, Any]]:
        """Returns a line for each run: its settings, its last evaluation and its name."""
        names = [name for name in headline if name in self.result.values]
        names += sorted(self.result.values.keys() - set(names))
        rows = []
        for number, settings in self.settings.items():
            values = {name: self.result.values[name].get(number) for name in names}
            rows.append({**settings, **values, "run": self.result.runs.get(number)})
        return rows


def run_grid(
    recipes: "Mapping[int, Recipe]",
    varied: Sequence[str],
    registry: "Registry",
    parallel: int,
    go_on: bool,
    tags: "Mapping[str, str]",
    note: str,
    again: str,
    quiet: bool,
    as_json: bool,
    takeover: bool,
    allow_drift: bool,
) -> NoReturn:
    """Trains every combination of values as a run of one group, prints a table, and exits.

    Args:
        recipes: The recipe of every combination, by number.
        varied: Dotted paths of the settings with several values.
        registry: Contains their plugins.
        parallel: Number of simultaneous trainings.
        go_on: Whether to continue the newest unfinished group of the same recipes.
        tags: The user's tags of every run.
        note: The user's description of every run.
        again: The command that continues the group.
        quiet: Whether no progress is displayed.
        as_json: Whether the result is printed as JSON.
        takeover: Whether a process on another machine that may own the group counts as dead.
        allow_drift: Whether the group is continued although code, packages or data have changed.

    Raises:
        UsageError: Two combinations are the same.
    """
    settings = {number: _settings_of(recipe, varied) for number, recipe in recipes.items()}
    _refuse_repetition(recipes, settings)
    recipe = next(iter(recipes.values()))
    console = Console(stderr=True, quiet=quiet)
    with SeedsProgressDisplay(console, recipe, len(recipes), "run") as display:
        from runner.tracking import Workspace
        from runner.training.seeds import train_seeds

        with display.phase("training"):
            result = train_seeds(
                recipes, registry, Workspace(), display, parallel, go_on, tags, note, again, takeover, "grid", varied,
                allow_drift,
            )  # fmt: skip
    grid = Grid(result, settings)
    output(as_json, grid.data, show, grid, recipe.headline, recipe.objective, again)
    raise Exit(result.exit_code)


def _settings_of(recipe: "Recipe", varied: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the settings with several values, sections as text."""
    values: dict[str, Any] = {}
    for path in varied:
        value: Any = recipe.values()
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        values[path] = dump_inline(value) if isinstance(value, Mapping) else value
    return values


def _refuse_repetition(recipes: "Mapping[int, Recipe]", settings: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises a UsageError if two combinations are the same training."""
    numbers: dict[str, int] = {}
    for number, recipe in recipes.items():
        # Runs of a group are found by their digests when it is resumed.
        first = numbers.setdefault(recipe.digest, number)
        if first != number:
            text = ", ".join(f"{path}={value}" for path, value in settings[number].items())
            raise UsageError(f"runs {first} and {number} of the grid are the same: {text}")


def show(grid: Grid, headline: Sequence[str], objective: "Objective | None", again: str, console: Console) -> None:
    """Prints a line for each run, the best one, and why some of them failed."""
    from runner.tracking.listing import headed
    from runner.tracking.run_table import show_table

    result = grid.result
    console.print(headed(result.name, result.status).append(f", {len(result.runs)} runs"))
    show_table(grid.rows(headline), "", console)
    best = grid.best(objective)
    if best is not None and objective is not None:
        settings = " ".join(f"{path}={value}" for path, value in grid.settings[best].items())
        value = figure(result.values[objective.name][best])
        print_wrapped(f"best {objective.name} at the end: {value} with {settings}", console)
    for number, reason in result.failures.items():
        print_wrapped(f"run {number}: {reason}", console, style="red")
    print_wrapped(f"kept in {result.folder}", console)
    next_command = again
    if result.status == "FINISHED":
        # The best run, if there is one, and another.
        numbers = sorted(result.runs, key=lambda number: number != best)
        next_command = f"runner compare {' '.join(result.runs[number] for number in numbers[:2])}"
    print_wrapped(f"next: {next_command}", console)
