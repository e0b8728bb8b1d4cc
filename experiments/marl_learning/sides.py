"""On which side of the obstacle does the leader fly, and how well is it followed there?

    python experiments/marl_learning/sides.py --jobs 2
    python experiments/marl_learning/sides.py --report

Trains the flagship for three tenths of its length, by which the side is decided, with several seeds
and variants. ``sides.json`` is written after every training, and a training that it contains is not
repeated. Every training has one thread and takes about two minutes of processor time.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import runner
from runner.api import Learner
from runner.plugins.marl.uav.config import UavConfig
from runner.plugins.marl.uav.environment import UavEnvironment

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from seeds import Results, SeedStudy  # noqa: E402

RECIPE = HERE.parents[1] / "recipes" / "marl_phase2.yaml"
FLIGHTS = 1000
FOLLOWERS = 3
SAVED_EVERY = 14_000
STEPS = 42_000
"""Environment steps after which a training is stopped; its learning rates are those of the full length."""
SUCCESS, FORMATION = 1, 6
"""Entries of a finished episode, in the order of ``UavEnvironment.summarise``."""
PRESET = ["data.reward.goal_distance=-0.02", "data.reward.collision=-500"]
"""The rewards of every training, unless a variant has others; those of the recipe were chosen later."""
VARIANTS: dict[str, list[str]] = {
    "marl_phase2": [],
    "initial temperature 0.2": ["model.initial_temperature=0.2"],
    "5,000 random steps": ["data.warmup=5000"],
    "matched speed pays 3": ["data.reward.speed_match=3"],
    "a step costs 3": ["data.reward.step=-3"],
    "distance costs 3 times as much": ["data.reward.goal_distance=-0.06"],
}
COLUMNS = {"left": "{:.0%}", "formation": "{:.1%}", "success": "{:.1%}", "steps": "{:.1f}"}


def train(variant: str, seed: int) -> dict[str, float]:
    """Trains until ``STEPS``; returns how the policy flies."""
    with tempfile.TemporaryDirectory(prefix="sides-", ignore_cleanup_errors=True) as workspace:
        os.environ["RUNNER_WORKSPACE"] = workspace
        settings = [*PRESET, *VARIANTS[variant], f"seed={seed}", f"train.checkpoint_every={SAVED_EVERY}"]
        settings += ["system.threads=1", "name=sides"]
        command = [sys.executable, "-m", "runner", "run", str(RECIPE), *settings, "--quiet"]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not reached(Path(workspace)):
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.wait()
        flown = fly(runner.load_model("sides", checkpoint="last"))
        return {**flown, "seconds": round(time.monotonic() - started)}


def reached(workspace: Path) -> bool:
    """Returns whether there is a checkpoint at ``STEPS`` or later."""
    steps = (int(path.name.rpartition("-")[2]) for path in workspace.glob("runs/*/checkpoints/step-*"))
    return max(steps, default=0) >= STEPS


@torch.no_grad()
def fly(policy: Learner) -> dict[str, float]:
    """Flies from fresh starts; returns shares of flights and mean steps.

    Returns:
        ``left``: share of the flights that pass the obstacle with a smaller x. ``formation``: share of
        steps and followers in formation. ``success`` and ``steps``: as in an evaluation.
    """
    starts = torch.Generator().manual_seed(1_000_000)
    config = UavConfig(followers=FOLLOWERS)
    environment = UavEnvironment(config, FLIGHTS, torch.device("cpu"), starts)
    observation = environment.reset()
    obstacle = environment.state_dict()["scene"][:, :2].clone()
    running = torch.ones(FLIGHTS, dtype=torch.bool)
    before = torch.ones(FLIGHTS, dtype=torch.bool)
    left = torch.zeros(FLIGHTS, dtype=torch.bool)
    succeeded = torch.zeros(FLIGHTS, dtype=torch.bool)
    steps = torch.zeros(FLIGHTS)
    formed = torch.zeros(FLIGHTS)
    while running.any():
        step = environment.step(policy.predict(observation))
        scene = environment.state_dict()
        passed = before & running & (scene["bodies"][:, 0, 1] < obstacle[:, 1])
        left |= passed & (scene["bodies"][:, 0, 0] < obstacle[:, 0])
        before &= ~passed
        steps += running
        ended = running & (step.terminated | step.truncated)
        formed[ended] = step.episodes[ended, FORMATION].float()
        succeeded |= ended & (step.episodes[:, SUCCESS] > 0)
        running &= ~ended
        observation = step.observation
    return {
        "left": float((left & ~before).float().sum() / (~before).float().sum().clamp(min=1)),
        "formation": float(formed.mean()),
        "success": float(succeeded.float().mean()),
        "steps": float(steps[succeeded].mean()) if succeeded.any() else float("nan"),
    }


def report(results: Results) -> None:
    """Prints one row for every training, and the number of trainings that fly left."""
    print("| training | left | formation | success | steps |\n|---|---|---|---|---|")
    for name, row in sorted(results.items()):
        print(f"| {name} | " + " | ".join(form.format(row[key]) for key, form in COLUMNS.items()) + " |")
    for variant in VARIANTS:
        rows = [row for name, row in results.items() if name.startswith(f"{variant}, seed")]
        if rows:
            sides = [row["left"] for row in rows]
            count = sum(side > 0.5 for side in sides)
            print(f"{variant}: {count} of {len(rows)} fly left, {statistics.fmean(sides):.0%} in the mean")


STUDY = SeedStudy(
    script=__file__,
    description=__doc__ or "",
    variants=list(VARIANTS),
    seeds=list(range(1, 9)),
    results=HERE / "sides.json",
    train=train,
    report=report,
)

if __name__ == "__main__":
    STUDY.main()
