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
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import figures
from runner.tracking.description import code, describe
from runner.tracking.keys import mlflow_key
from runner.tracking.tracker import Tracker
from runner.training.group_data import Group
from runner.training.pipeline import Assembly


def start_tags(
    recipe: Recipe,
    pipeline: Assembly,
    parent: Group | None,
    checkout: Checkout | None,
) -> dict[str, str]:
    """Returns the tags that describe a run in addition to its settings."""
    return {
        "mlflow.source.name": str(recipe.path),
        "mlflow.source.git.commit": checkout.commit if checkout else "unknown",
        "kind": "run",
        **({"mlflow.parentRunId": parent.run_id} if parent and parent.run_id else {}),
        "recipe.name": recipe.name,
        "recipe.digest": recipe.digest,
        "overrides": ", ".join(assignments(recipe.overrides)) or "none",
        **stage_tags(pipeline),
        **({"callbacks": ",".join(recipe.callbacks)} if recipe.callbacks else {}),
        **(pipeline.start.tags() if pipeline.start is not None else {}),
        "device": str(pipeline.device),
        **_process_tags(pipeline),
        **{f"hardware.{name}": str(value) for name, value in hardware().items()},
    }


def _process_tags(pipeline: Assembly) -> dict[str, str]:
    """Returns the number of processes, if several train together."""
    processes = pipeline.context.processes
    return {} if processes is None else {"processes": str(processes.count)}


def resume_tags(
    recipe: Recipe, changes: Sequence[Change], drift: Sequence[str], step: int
) -> dict[str, str]:
    """Returns tags for a run that is resumed.

    Settings that have changed are tags, because MLflow never replaces the value of a parameter.
    """
    time_of_day = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    tags = {f"resumed.{time_of_day}": "; ".join([f"at step {step}", *drift])}
    if changes:
        tags["recipe.digest"] = recipe.digest
    for change in changes:
        values = f"{change.before} until step {step}, then {change.after}"
        tags[f"changed.{change.path}"] = values
    return tags


def stage_tags(pipeline: Assembly) -> dict[str, str]:
    """Returns tags with the active stages, and the reason of each inactive one."""
    reports = pipeline.reports.values()
    active = [report.kind for report in reports if report.active]
    inactive = {
        f"stages.inactive.{report.kind}": str(report.reason)
        for report in reports
        if not report.active
    }
    return {"stages": ",".join(active) or "none", **inactive}


def description_of(
    pipeline: Assembly,
    tracker: Tracker,
    resume_command: str,
    ending: str = "",
    metrics: Mapping[str, float] | None = None,
    changes: str = "",
) -> str:
    """Returns the description of a run: its recipe, how to resume it, and its result.

    Args:
        pipeline: The pipeline of the run.
        tracker: The run.
        resume_command: The command that continues it.
        ending: Its status and length once it has ended.
        metrics: Its last metrics.
        changes: What callbacks have changed in the learner.
    """
    recipe = pipeline.recipe
    digits = tracker.run_id[:8]
    metrics = {mlflow_key(name): value for name, value in (metrics or {}).items()}
    # A recipe without an objective has no headline.
    evaluations = sorted(name for name in metrics if name.startswith("eval/"))
    headline = tracker.headline or evaluations
    tests = [f"test/{name.removeprefix('eval/')}" for name in headline]
    names = (*headline, *tests, "perf/update_ms")
    values = {name: metrics[name] for name in names if name in metrics}
    reports = pipeline.reports.values()
    active = [report.kind for report in reports if report.active]
    inactive = [
        f"{code(report.kind)}: {report.reason}"
        for report in reports
        if not report.active
    ]
    is_finished = ending.startswith("FINISHED")
    facts = {
        "recipe": f"{code(recipe.name)}, from {code(shown_path(recipe.path))}",
        # MLflow's page shows the first lines without a click.
        "result": "; ".join(filter(None, (ending, figures(values)))),
        "data": SYNTHETIC_REMARK if recipe.data.is_synthetic() else "",
        "smoke test": SMOKE_REMARK if recipe.train.smoke else "",
        "overridden": code(*assignments(recipe.overrides)),
        "stages": code(*active) or "none",
        "inactive": "; ".join(inactive),
        "callbacks": changes,
        "continue it": "" if is_finished else code(resume_command),
        "compare it": code(f"runner compare {digits} OTHER_RUN"),
        "load its model": code(f'runner.load_model("{digits}")'),
    }
    # The user's note comes first.
    return "\n\n".join(filter(None, (tracker.note, describe(facts))))
