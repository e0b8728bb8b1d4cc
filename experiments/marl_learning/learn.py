"""Trains every variant with several seeds as child processes of ``runner run``, and collects what they learnt.

    python experiments/marl_learning/learn.py --jobs 2
    python experiments/marl_learning/report.py

A variant and seed that ``results.json`` holds already is not trained again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlflow import MlflowClient

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
METRICS = ("success_rate", "collision_rate", "timeout_rate", "steps_to_goal", "formation_rate", "formation_strict", "return")
COMMON = ("train.env_steps=60_000", "data.reward.preset=v0_2", "data.evaluation.episodes=500", "tracking.system_metrics=false")
VARIANTS = {
    "3 followers, prioritized": ("data.followers=3",),
    "3 followers, uniform": ("data.followers=3", "data.replay.kind=uniform"),
    "2 followers, prioritized": ("data.followers=2",),
    "1 follower, prioritized": ("data.followers=1",),
    "4 followers, prioritized": ("data.followers=4",),
}


def train(variant: str, seed: int) -> dict:
    """One run in a workspace of its own; returns its evaluations and what it took."""
    with tempfile.TemporaryDirectory() as workspace:
        sets = [part for value in (*COMMON, *VARIANTS[variant], f"seed={seed}") for part in ("--set", value)]
        child = subprocess.run(
            [sys.executable, "-m", "runner", "run", "marl_phase3", "--quiet", "--json", *sets],
            env={**os.environ, "RUNNER_WORKSPACE": workspace, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise SystemExit(f"{variant}, seed {seed}:\n{child.stderr}")
        result = json.loads(child.stdout)
        client = MlflowClient(result["tracking_uri"])
        curve: dict[int, dict[str, float]] = {}
        for name in METRICS:
            for point in client.get_metric_history(result["run_id"], f"eval/{name}"):
                curve.setdefault(point.step, {})[name] = point.value
        active = [kind for kind, report in result["stages"].items() if report["active"]]
    return {"curve": curve, "seconds": round(result["seconds"]), "stages": active, "sets": [*COMMON, *VARIANTS[variant]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [(variant, seed) for variant in arguments.variants for seed in arguments.seeds]
    missing = [(variant, seed) for variant, seed in wanted if str(seed) not in results.get(variant, {})]

    def one(job: tuple[str, int]) -> None:
        variant, seed = job
        found = train(variant, seed)
        results.setdefault(variant, {})[str(seed)] = found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True))
        last = found["curve"][max(found["curve"])]
        print(variant, f"seed {seed}, {found['seconds']} s:", {name: round(last[name], 3) for name in METRICS}, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(one, missing))


if __name__ == "__main__":
    main()
