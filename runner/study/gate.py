"""The gate's verdict on the stages of a trial, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.child.protocol import Parent
from runner.child.spawn import START_SECONDS, Child, Limits
from runner.compare.verdict import Outcome
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError
from runner.verify.gate import quick


def judge(recipe: Recipe, plugin_files: Sequence[Path], limits: Limits, stop: Callable[[], bool]) -> dict[str, Any]:
    """The verdict on all stages of a recipe together, without any training: its outcome and summary.

    What cannot be judged within the limits of a training is inconclusive.
    """
    if not recipe.stages:
        return {"outcome": str(Outcome.PASS), "summary": "no stage is on"}
    limits = replace(limits, seconds=min(limits.seconds, START_SECONDS), silence=START_SECONDS, grace=0.0)
    try:
        with Child("runner.study.gate", recipe, plugin_files=plugin_files, limits=limits) as child:
            return child.answer(stop=stop)
    except RunnerError as error:
        return {"outcome": str(Outcome.INCONCLUSIVE), "summary": f"it could not be judged: {error}"}


def main(parent: Parent) -> None:
    """Judges, and tells the verdict."""
    recipe, registry = parent.load()
    verdict = quick(recipe, registry, tuple(recipe.stages))
    parent.tell(outcome=str(verdict.outcome), summary=verdict.summary)
