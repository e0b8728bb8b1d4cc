"""Whether a recipe still learns as much with a stage as without, judged by whole trainings with paired seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.hardware import usable_cores
from runner.proof.statistics import NonInferiority
from runner.proof.verdict import Outcome, Verdict
from runner.recipe import Recipe

Say = Callable[[str], None]


@dataclass
class Trainings:
    """Trains recipes in child processes, as many at a time as there are cores, one thread each.

    A training that several stages are compared with is done once.
    """

    plugin_files: Sequence[Path]
    deadline: float
    """By ``time.monotonic``; no training is begun after it."""
    say: Say
    _done: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def run(self, recipes: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Evaluations before and after the training of every recipe with every seed, recipes outermost.

        Raises:
            RunnerError: a training failed.
        """
        wanted = [(json.dumps({**recipe, "seed": seed}, sort_keys=True), seed) for recipe in recipes for seed in seeds]
        new = [key for key in dict.fromkeys(wanted) if key not in self._done]
        with ThreadPoolExecutor(max(1, usable_cores())) as pool:
            for key, result in zip(new, pool.map(self._train, [text for text, _ in new]), strict=True):
                self._done[key] = result
        return [self._done[key] for key in wanted]

    def _train(self, text: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.yaml"
            path.touch(mode=0o600)
            path.write_text(text)
            command = [sys.executable, "-m", "runner.proof.trial", str(path), *map(str, self.plugin_files)]
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # several compute side by side
            child = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | threads)
        if child.returncode != 0:
            raise RunnerError(f"a training for the comparison failed:\n{child.stderr.strip()}")
        result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return result


def statistical(
    reference: Recipe,
    changed: Recipe,
    objective: tuple[str, str],
    margin: float,
    trainings: Trainings,
    steps: int,
    most_seeds: int,
) -> Verdict:
    """Trains both recipes with the same seeds until it is clear whether the changed one learns less.

    The measure is the share of what the reference learns: the objective after the training less that before it, over
    the same for the reference with the first seed. A share that is lower by less than ``margin`` is not worse.

    Args:
        reference: without the stage.
        changed: with it.
        objective: the evaluation metric, and ``maximize`` or ``minimize``.
        margin: how much of what is learnt may be lost.
        trainings: trains.
        steps: environment steps or updates of every training.
        most_seeds: INCONCLUSIVE if it is not clear by then.
    """
    name, direction = objective
    sign = 1.0 if direction == "maximize" else -1.0
    recipes = [_short(each, steps) for each in (reference, changed)]
    test = NonInferiority(margin=margin, most=most_seeds)
    scale = 0.0
    for first in range(0, most_seeds, 2):
        if time.monotonic() > trainings.deadline:
            break
        seeds = [reference.seed + 1 + i for i in range(first, min(first + 2, most_seeds))]
        results = trainings.run(recipes, seeds)
        for without, with_stage in zip(results[: len(seeds)], results[len(seeds) :], strict=True):
            learnt = [sign * (each["after"][name] - each["before"][name]) for each in (without, with_stage)]
            scale = scale or learnt[0]
            if scale <= 0:
                summary = f"the reference learns nothing in {steps} steps: {name} does not improve; train longer"
                return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary, {"steps": steps})
            test.add(learnt[0] / scale, learnt[1] / scale)
        trainings.say(f"{name} after {steps} steps, {len(test)} seeds: {test.summary()}")
        if test.decision() is not None:
            break
    if not len(test):
        summary = "no training was begun within the budget; 'runner verify' trains"
        return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary, {"steps": steps})
    evidence = {"metric": name, "steps": steps, "scale": scale, **test.evidence()}
    return Verdict(test.conclude(), "Statistical", f"{name} after {steps} steps: {test.summary()}", evidence)


def _short(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The recipe's values for a training of that length, evaluated at its end only."""
    values = recipe.values(masked=False)
    goal = "env_steps" if recipe.data.simulates else "updates"
    values["train"] |= {goal: steps, "evaluate_every": None, "checkpoint_every": None, "log_every": steps}
    return values
