"""The gate's verdict on the stages of a trial, in a process of its own: ``python -m runner.study.gate RECIPE``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.proof.child import Child
from runner.proof.recipe_gate import quick
from runner.proof.verdict import Outcome
from runner.recipe import Recipe, load
from runner.registry import Registry

JUDGE_SECONDS = 1800.0


def judge(recipe: Recipe, plugin_files: Sequence[Path]) -> dict[str, Any]:
    """The verdict on all stages of a recipe together, without any training: its outcome and summary.

    Raises:
        RunnerError: it cannot be judged.
    """
    if not recipe.stages:
        return {"outcome": str(Outcome.PASS), "summary": "no stage is on"}
    with Child("runner.study.gate", recipe, tuple(recipe.stages), plugin_files) as child:
        return child.ask("judge", JUDGE_SECONDS)


def main() -> int:
    """Judges when asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    path, *plugins = sys.argv[1:]
    registry = Registry([Path(plugin) for plugin in plugins])
    try:
        recipe = load(path, (), registry)
        Path(path).unlink()  # it may hold secrets, and nobody tidies up after a kill
        for _ in sys.stdin:
            verdict = quick(recipe, registry, tuple(recipe.stages))
            answers.write(json.dumps({"outcome": str(verdict.outcome), "summary": verdict.summary}) + "\n")
            answers.flush()
    except RunnerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
