"""The table of runs as MLflow's page opens it: the columns that matter, and the best run first.

The page reads what it calls a shared view from a tag of the experiment, if its address has the key. Newer ones also
offer it by its name.
"""

import json
from collections.abc import Iterable, Sequence

from runner.recipe.recipe import Recipe
from runner.tracking.keys import mlflow_key

NAME = "Best runs first"
TAG = "mlflow.sharedViewState.runner"
"""The tag of the experiment."""
SHARED = "viewStateShareKey=runner"
"""The part of an address that opens the view."""
_TOP_LEVEL = "tags.kind != 'trial' AND tags.kind != 'variant'"
"""The trials of a study and the variants of an ablation would fill the table of runs."""
_RUN_WIDTH = 240
_METRIC_WIDTH = 120
_COMMON_COLUMNS = {
    "tags.`overrides`": 270,
    "metrics.`perf/update_ms`": 120,
    "duration": 80,
    "tags.`kind`": 75,
}
"""Columns right of the objective, before those that may not fit on a screen."""


def headline_of(recipe: Recipe) -> tuple[str, ...]:
    """Returns the MLflow keys of the metrics to show first, the objective before all others."""
    objective = [recipe.objective.name] if recipe.objective else []
    return tuple(mlflow_key(f"eval/{name}") for name in dict.fromkeys([*objective, *recipe.headline]))


def view_of(recipe: Recipe, also: Sequence[str] = ()) -> str:
    """The view for runs of a recipe, sorted by its objective: how good, by what, how fast; then the other headline.

    ``also`` are further metrics next to the objective.
    """
    objective = recipe.objective
    names = headline_of(recipe)
    first = names[:1] if objective else ()
    columns = _metrics([*first, *also]) | _COMMON_COLUMNS | _metrics(names)
    widths = {"attributes.`Run Name`": _RUN_WIDTH} | columns
    state = {
        "searchFilter": _TOP_LEVEL,
        "orderByKey": f"metrics.`{first[0]}`" if objective else "attributes.start_time",
        "orderByAsc": objective is not None and objective.direction == "minimize",
        # The page always has the duration.
        "selectedColumns": [column for column in columns if column != "duration"],
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    envelope = {"name": NAME, "createdAt": 0, "state": json.dumps(state)}
    # Older pages read the fields outside of the envelope.
    return json.dumps(state | envelope)


def _metrics(names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys((f"metrics.`{name}`" for name in names), _METRIC_WIDTH)
