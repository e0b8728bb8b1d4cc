"""The table of runs as MLflow's page opens it: the columns that matter, and the best run first.

The page reads what it calls a shared view from a tag of the experiment, if its address names the key.
"""

import json
from collections.abc import Sequence

from runner.recipe.recipe import Recipe

KEY = "runner"
TAG = f"mlflow.sharedViewState.{KEY}"
_TAGS = ("overrides", "kind")
_WIDTHS = {"overrides": 300}
_WIDTH = 120


def view_of(recipe: Recipe, also: Sequence[str] = ()) -> str:
    """The view for runs of a recipe: its objective, by which it is sorted, its headline and the time of an update.

    ``also`` are further metrics that stand before the last one.
    """
    objective = recipe.objective
    best = [objective.name] if objective else []
    metrics = dict.fromkeys([*(f"eval/{name}" for name in (*best, *recipe.headline)), *also, "perf/update_ms"])
    widths = {f"metrics.`{name}`": _WIDTH for name in metrics}
    widths |= {f"tags.`{name}`": _WIDTHS.get(name, _WIDTH) for name in _TAGS}
    state = {
        "orderByKey": f"metrics.`eval/{objective.name}`" if objective else "attributes.start_time",
        "orderByAsc": objective is not None and objective.direction == "minimize",
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    return json.dumps(state, separators=(",", ":"))


def address(server: str, experiment_id: str) -> str:
    """Where a server's page shows the runs of an experiment in that view."""
    return f"{server}/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}"
