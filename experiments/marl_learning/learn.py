"""Trains every variant with several seeds, and collects what they learnt.

    python experiments/marl_learning/learn.py --jobs 2
    python experiments/marl_learning/report.py

A variant and seed that ``results.json`` holds already is not trained again.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from curves import train  # noqa: E402

RESULTS = HERE / "results.json"
COMMON = (  # what the recipe had when these were trained
    "model.hidden=[256, 256]",
    "model.gamma=0.95",
    "model.tau=0.01",
    "optimizer.critic.lr=3e-3",
    "optimizer.temperature.lr=3e-4",
    "train.env_steps=60_000",
    "data.evaluation.episodes=500",
    "tracking.system_metrics=false",
)
VARIANTS = {
    "3 followers, prioritized": ("data.followers=3",),
    # Nothing in uniform replay depends on the length of the training, so its first half is that of a whole one.
    "3 followers, uniform": ("data.followers=3", "data.replay.kind=uniform", "train.env_steps=30_000"),
    "2 followers, prioritized": ("data.followers=2",),
    "1 follower, prioritized": ("data.followers=1",),
    "4 followers, prioritized": ("data.followers=4",),
}


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
        found = train(str(HERE / "before.yaml"), [*COMMON, *VARIANTS[variant], f"seed={seed}"])
        results.setdefault(variant, {})[str(seed)] = found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True))
        last = found["curve"][max(found["curve"])]
        print(f"{variant}, seed {seed}, {found['seconds']} s:", {k: round(v, 3) for k, v in last.items()}, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(one, missing))


if __name__ == "__main__":
    main()
