"""Selects the metric of evaluations that a setting compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from runner.plugin.contract import Objective

Direction = Literal["minimize", "maximize"]


def watched_metric(
    metric: str | None, direction: Direction | None, objective: Objective | None
) -> tuple[str, Direction] | None:
    """Returns a metric without ``eval/`` and its direction; None if one of them is unknown.

    Args:
        metric: The metric with ``eval/``; None is the objective.
        direction: The direction; None is that of the objective, if it is the metric.
        objective: That of the recipe.
    """
    name = (metric or "").removeprefix("eval/")
    if metric is None and objective is not None:
        name = objective.name
    if direction is None and objective is not None and objective.name == name:
        direction = objective.direction
    return (name, direction) if name and direction else None


def missing_metric(name: str, names: set[str]) -> str:
    """Returns the message that evaluations have no such metric.

    Args:
        name: The metric, without ``eval/``.
        names: The metrics that evaluations have, without ``eval/``.
    """
    present = ", ".join(f"eval/{metric}" for metric in sorted(names))
    return f"the evaluation has no 'eval/{name}'; it has {present}"
