"""Kills trainings hundreds of times and compares what they come to with trainings that nobody killed.

    python experiments/soak/soak.py --kills 160

Every recipe that ships and every stage that is registered takes its turn, with the harness of the test suite: real
processes, real SIGKILL, at random moments, at the fault points of a save, in the spool and in what goes to MLflow.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
RANDOM_KILLS, FAULTS = 6, 4
SETTINGS = {
    "marl": ("train.env_steps=800", "train.checkpoint_every=40", "train.log_every=12"),
    **dict.fromkeys(
        ("digits", "mlp"),
        ("train={epochs: 30, batch_size: 64, log_every: 1, evaluate_every: 5, checkpoint_every: 2}",),
    ),
    "shakespeare": ("train.tokens=25600", "train.log_every=256", "train.checkpoint_every=1280"),
    **dict.fromkeys(("mamba2", "gpt2"), ("train.tokens=25600", "train.log_every=256", "train.checkpoint_every=1280")),
    **dict.fromkeys(("gcn", "emma"), ("train.epochs=60",)),
    **dict.fromkeys(("conv", "cloud", "recall", "pgt", "gps", "graphgpt", "grasp", "graf"), ("train.updates=60",)),
}
"""By the beginning of a recipe's name."""
OBSERVERS = ROOT / "tests" / "observers.py"
OF_A_TRAINING = {
    "early stop": "train.stop={metric: eval/accuracy, patience: 50}",
    "groups and layer_decay": "optimizer={groups: {stem: {lr: 1e-4}, head: {weight_decay: 0}}, layer_decay: 0.8}",
    "averages": "train.ema=0.9",
    "best checkpoints": "train.keep={best: 2, last: 2}",
    "plateau": "lr_scheduler={kind: plateau, patience: 0, factor: 0.5, min_delta: 0.3, warmup: 0.1}",
    "warm restarts": "lr_scheduler={kind: cosine_restarts, cycles: 3, warmup: 0.1}",
    "skipped updates": "train.on_nonfinite={action: skip, at_most: 10}",
    "class weights": "model.class_weights=balanced",
    "balanced sampling": "data.sampling=balanced",
    "sinks": "tracking.sinks=[csv, tensorboard]",
    "one batch": "train.overfit_batches=1",
    "limited data": "data.limit={train: 0.5, held_out: 0.5}",
    "callback": "callbacks.counter=on",
}
"""Settings for any training, by what they do; each alone with the digits."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="these recipes and stages, for example marl_phase2 'stage amp'")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

    subjects = [subject for subject in list_subjects() if not options.only or subject[0] in options.only]
    chance, rows, started, turn = random.Random(options.seed), [], time.time(), 0
    while sum(row["kills"] for row in rows) < options.kills or turn < len(subjects):
        name, command = subjects[turn % len(subjects)]
        row = soak(name, command, chance, seed=options.seed + turn)
        rows.append(row)
        print(f"{name}: {row['kills']} kills, {row['outcome']} ({row['seconds']:.0f} s)", flush=True)
        turn += 1
        write(rows, started, options.seed, options.out)
    return 0 if all(row["outcome"] == "same bits" for row in rows) else 1


def settings_of(recipe):
    """Returns the settings that make a recipe short; raises a StopIteration for an unknown one."""
    return next(sets for beginning, sets in SETTINGS.items() if recipe.startswith(beginning))


def list_subjects():
    """Returns name and command line of every recipe, of every stage alone with what it requires, and of settings."""
    from interrupted import arguments
    from running import RECIPES, host_of, with_requirements

    from runner.plugin.registry import Registry

    def command(name, *more):
        return arguments(name, *settings_of(name), *more)

    recipes = [(path.stem, command(path.stem)) for path in sorted(RECIPES.glob("*.yaml"))]
    hosts = {}
    for kind in Registry().kinds("optimization"):
        # Some stages do nothing without a GPU.
        with suppress(AssertionError):
            hosts[kind] = host_of(kind)
    stages = [(f"stage {kind}", command(host, *with_requirements(kind, host))) for kind, host in hosts.items()]
    settings = []
    for name, value in OF_A_TRAINING.items():
        plugin = ["--plugin", str(OBSERVERS)] if value.startswith("callbacks.") else []
        settings.append((f"setting {name}", [*command("digits_classifier", value), *plugin]))
    return recipes + stages + settings


def soak(name, command, chance, seed):
    """One training without kills and one with."""
    from interrupted import survives

    from runner.system.faults import POINTS

    inside = [point for point in POINTS if point.startswith(("checkpoint.", "spool.", "ship."))]
    if "marl" not in " ".join(command):
        inside.remove("checkpoint.segment")  # nobody else keeps a replay buffer
    places = [
        f"checkpoint.{chance.choice(['tensors', 'state', 'synced', 'renamed'])}={chance.choice(['kill', 'torn'])}@2"
    ]
    for point in chance.choices(inside, k=FAULTS - 1):
        visit = 1 if point.startswith("ship.") else chance.randint(1, 3)  # so short a training need not ship thrice
        places.append(f"{point}={chance.choice(['kill', 'torn'])}@{visit}")
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        os.environ["RUNNER_WORKSPACE"] = str(workspace)
        try:
            survives(Path(folder), command, workspace, RANDOM_KILLS, places, seed)
            outcome = "same bits"
        except Exception:
            outcome = traceback.format_exc(limit=-1).strip()[-2000:]
    kills = RANDOM_KILLS + FAULTS
    return {"subject": name, "kills": kills, "faults": places, "outcome": outcome, "seconds": time.time() - begun}


def write(rows, started, seed, path):
    """The report so far."""
    import torch

    from runner.system.hardware import cpu_model

    report = {
        "kills": sum(row["kills"] for row in rows),
        "failures": sum(row["outcome"] != "same bits" for row in rows),
        "seconds": round(time.time() - started),
        "seed": seed,
        "cpu": cpu_model(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
