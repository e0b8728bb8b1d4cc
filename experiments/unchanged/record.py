"""Records what a change of the code must not change: every ``train/`` and ``eval/`` metric of short trainings.

``python experiments/unchanged/record.py > NAME.json`` records; with the path of a recording it compares and exits with
1 if a digit differs. The digits hold on one processor and one version of torch: record the code from before there too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mlflow import MlflowClient

RECIPES = ("marl_baseline", "marl_phase1")
# What the recipes had when the recording was made.
RECORDED = (
    "model.hidden=[256, 256]",
    "model.gamma=0.95",
    "model.tau=0.01",
    "optimizer.critic.lr=3e-3",
    "optimizer.temperature.lr=3e-4",
    "model.initial_temperature=1.0",
    "data={envs: 16, updates_per_step: 0.5, normalize_rewards: false, training_limit: null, repeat_failures: 0}",
    "data.replay={kind: prioritized, alpha: 0.6, beta: [0.4, 1.0]}",
    "lr_scheduler={kind: constant}",
)
SETS = (*RECORDED, "train.env_steps=3000", "train.log_every=100", "train.evaluate_every=1000")


def history(recipe: str) -> dict[str, list[list[float]]]:
    """Steps and values of every metric that depends on recipe and seed alone, of a training on one thread."""
    with tempfile.TemporaryDirectory() as workspace:
        sets = [part for value in SETS for part in ("--set", value)]
        child = subprocess.run(
            [sys.executable, "-m", "runner", "run", recipe, "--quiet", "--json", *sets],
            env={**os.environ, "RUNNER_WORKSPACE": workspace, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result = json.loads(child.stdout)
        client = MlflowClient(result["tracking_uri"])
        names = sorted(name for name in result["metrics"] if name.startswith(("train/", "eval/")))
        return {
            name: [[point.step, point.value] for point in client.get_metric_history(result["run_id"], name)]
            for name in names
        }


def main() -> int:
    """Records, or compares with a recording."""
    found = {recipe: history(recipe) for recipe in RECIPES}
    if len(sys.argv) == 1:
        print(json.dumps(found, indent=1))
        return 0
    expected = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    different = [
        f"{recipe} {name}"
        for recipe, metrics in expected.items()
        for name, points in metrics.items()
        if found[recipe].get(name) != points
    ]
    count = sum(len(points) for metrics in expected.values() for points in metrics.values())
    print(*different, f"{len(different)} metrics differ; {count} values compared", sep="\n")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
