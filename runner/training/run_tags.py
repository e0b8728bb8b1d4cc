"""Tags and description of a run in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from runner.recipe.loader import assignments
from runner.recipe.provenance import Checkout
from runner.recipe.recipe import Recipe
from runner.recipe.resumption import Change
from runner.system.hardware import hardware
from runner.system.suggestions import shown_path
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.system.text_lines import figures
from runner.tracking.description import code, describe
from runner.tracking.keys import mlflow_key
from runner.tracking.tracker import Tracker
from runner.training.pipeline import Assembly


def start_tags(
    recipe: Recipe,
    pipeline: Assembly,
    parent: tuple[str, str] | None,
    checkout: Checkout | None,
) -> dict[str, str]:
    """Returns the tags that describe a run in addition to its settings."""
    return {
        "mlflow.source.name": str(recipe.path),
        "mlflow.source.git.commit": checkout.commit if checkout else "unknown",
        "kind": "run",
        **({"mlflow.parentRunId": parent[1]} if parent and parent[1] else {}),
        "recipe.name": recipe.name,
        "recipe.digest": recipe.digest,
        "overrides": ", ".join(assignments(recipe.overrides)) or "none",
        **stage_tags(pipeline),
        **(pipeline.start.tags() if pipeline.start is not None else {}),
        "device": str(pipeline.device),
        **{f"hardware.{name}": str(value) for name, value in hardware().items()},
    }


def resume_tags(
    recipe: Recipe, changes: Sequence[Change], drift: Sequence[str], step: int
) -> dict[str, str]:
    """Returns tags for a run that is resumed.

    Settings that have changed are tags, because MLflow never replaces the value of a parameter.
    """
    tags = {
        f"resumed.{time.strftime('%Y-%m-%dT%H:%M:%S%z')}": "; ".join(
            [f"at step {step}", *drift]
        )
    }
    if changes:
        tags["recipe.digest"] = recipe.digest
    for change in changes:
        tags[f"changed.{change.path}"] = (
            f"{change.before} until step {step}, then {change.after}"
        )
    return tags


def stage_tags(pipeline: Assembly) -> dict[str, str]:
    """Returns tags with the stages that are active, and why others are not."""
    active = [report.kind for report in pipeline.reports.values() if report.active]
    inactive = {
        f"stages.inactive.{r.kind}": str(r.reason)
        for r in pipeline.reports.values()
        if not r.active
    }
    return {"stages": ",".join(active) or "none", **inactive}


def description_of(
    pipeline: Assembly,
    tracker: Tracker,
    again: str,
    ended: str = "",
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Returns what a run is, how to resume it, and its result once it has ended."""
    recipe, digits = pipeline.recipe, tracker.run_id[:8]
    metrics = {mlflow_key(name): value for name, value in (metrics or {}).items()}
    headline = tracker.headline or sorted(
        name for name in metrics if name.startswith("eval/")
    )
    values = {
        name: metrics[name] for name in (*headline, "perf/update_ms") if name in metrics
    }
    reports = pipeline.reports.values()
    facts = describe(
        {
            "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
            # Where the page shows it immediately.
            "result": "; ".join(filter(None, (ended, figures(values)))),
            "data": SYNTHETIC_REMARK if recipe.data.is_synthetic() else "",
            "overridden": code(*assignments(recipe.overrides)),
            "stages": code(*(report.kind for report in reports if report.active))
            or "none",
            "inactive": "; ".join(
                f"{code(report.kind)}: {report.reason}"
                for report in reports
                if not report.active
            ),
            "continue it": "" if ended.startswith("FINISHED") else code(again),
            "compare it": code(f"runner compare {digits} OTHER_RUN"),
            "load its model": code(f'runner.load_model("{digits}")'),
        }
    )
    return "\n\n".join(
        filter(None, (tracker.note, facts))
    )  # the user's note comes first
