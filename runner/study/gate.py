"""The gate's verdict on the stages of a trial, in a process of its own: ``python -m runner.study.gate RECIPE``."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.child.process import Child
from runner.compare.verdict import Outcome
from runner.plugin.registry import Registry
from runner.recipe import Recipe, load
from runner.study.config import LimitsConfig
from runner.system.errors import RunnerError
from runner.verify.gate import quick

JUDGE_SECONDS = 1800.0


def judge(
    recipe: Recipe, plugin_files: Sequence[Path], limits: LimitsConfig, stop: Callable[[], bool]
) -> dict[str, Any]:
    """The verdict on all stages of a recipe together, without any training: its outcome and summary.

    What cannot be judged within the limits of a training is inconclusive.
    """
    if not recipe.stages:
        return {"outcome": str(Outcome.PASS), "summary": "no stage is on"}
    try:
        with Child("runner.study.gate", recipe, tuple(recipe.stages), plugin_files) as child:
            return child.ask("judge", limits.seconds or JUDGE_SECONDS, stop)
    except RunnerError as error:
        return {"outcome": str(Outcome.INCONCLUSIVE), "summary": f"it could not be judged: {error}"}


def main() -> int:
    """Judges when asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    path, *plugins = sys.argv[1:]
    registry = Registry([Path(plugin) for plugin in plugins])
    try:
        recipe = load(path, (), registry)
        Path(path).unlink()  # it may hold secrets, and nobody tidies up after a kill
        commands: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_listen, args=(commands,), daemon=True).start()
        while commands.get():
            verdict = quick(recipe, registry, tuple(recipe.stages))
            answers.write(json.dumps({"outcome": str(verdict.outcome), "summary": verdict.summary}) + "\n")
            answers.flush()
    except RunnerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _listen(commands: queue.Queue[str]) -> None:
    """Ends this process with its parent, whatever it is at."""
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
