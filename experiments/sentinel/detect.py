"""Does a sentinel detect faults that start late, and is it silent in correct trainings?

    python experiments/sentinel/detect.py late      # stages that go wrong between update 100 and 10,000
    python experiments/sentinel/detect.py correct   # correct stages of all families
    python experiments/sentinel/detect.py table

Every training is a process of its own, small. The share is 1 % for late faults and 10 % for correct
trainings. Results are appended to ``results.jsonl`` as soon as they are known; a training that it
contains is not repeated.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests"
RESULTS = HERE / "results.jsonl"
SHARE = 0.01
CORRECT_SHARE = 0.1
"""Of correct trainings: a false alarm is as likely in each comparison, and more are made in the same time."""
FAULTS = ("scale", "decay", "moment", "sign")
RECIPES = ("digits_classifier", "shakespeare_gpt", "marl_baseline", "gcn_cora", "grasp_diffusion", "graf")
WITHOUT = ("fused_optimizer", "heap_retention", "amp", "prefetch", "bucketing")
"""Stages that the recipes switch on, and that are off beside a wrong one."""
CORRECT = {
    "digits_classifier": ("fused_optimizer", "heap_retention", "set_to_none", "preprocess_once"),
    "shakespeare_gpt": ("activation_checkpointing", "fused_optimizer"),
    "marl_baseline": ("forward_cache", "merged_critic_loss", "stacked_agents"),
    "gcn_cora": ("fused_optimizer", "heap_retention"),
    "grasp_diffusion": ("activation_checkpointing", "fused_optimizer"),
    "graf": ("activation_checkpointing", "heap_retention"),
}
LATE = 30
SEEDS = 34
"""Seeds of correct trainings for each recipe."""
UPDATES_AFTER = 6_000
"""Updates after the first wrong one, within which the fault has to be detected."""
CORRECT_SECONDS = 5.0


def jobs(kind):
    """Yields the name and the settings of every training."""
    if kind == "late":
        rng = random.Random(51)
        for number in range(LATE):
            fault = FAULTS[number % len(FAULTS)]
            recipe = RECIPES[number % 3]
            first = round(10 ** rng.uniform(2, 4))
            yield f"late {number}", {"recipe": recipe, "fault": fault, "first": first, "seed": number}
    else:
        for recipe, stages in CORRECT.items():
            for seed in range(SEEDS):
                stage = stages[seed % len(stages)]
                yield f"correct {recipe} {seed}", {"recipe": recipe, "stage": stage, "seed": seed}


def train(job):
    """Trains in this process until an alarm or the end; returns the result."""
    sys.path[:0] = [str(TESTS)]
    from running import tiny, with_requirements

    from runner.plugin.registry import Registry
    from runner.recipe.safeguards import SentinelConfig
    from runner.system.errors import SentinelError
    from runner.training.pipeline import assemble
    from runner.training.sentinel import Sentinel
    from runner.training.step import Step

    registry = Registry([TESTS / "training" / "late_faults.py"])
    sets = [f"optimization.{kind}=off" for kind in WITHOUT if kind != job.get("stage")]
    if "fault" in job:
        stage = f"{{first: {job['first']}, fault: {job['fault']}, promise: close}}"
        # A gradient whose norm is limited is the same for a larger loss.
        sets += ["optimizer.max_grad_norm=null"] * (job["fault"] == "scale" and "marl" not in job["recipe"])
        sets.append(f"optimization.late={stage}")
    else:
        sets += with_requirements(job["stage"], job["recipe"])
    unit = next(
        iter(
            {"marl": "env_steps", "shakespeare": "tokens", "digits": "epochs", "gcn": "epochs"}.get(
                job["recipe"].partition("_")[0], "updates"
            ).split()
        )
    )
    recipe = tiny(job["recipe"], *sets, f"train.{unit}=100000000", f"seed={job['seed']}", registry=registry)
    pipeline = assemble(recipe, registry.files)
    share = SHARE if "fault" in job else CORRECT_SHARE
    sentinel = Sentinel(Step(pipeline), pipeline, SentinelConfig(share=share))
    last = job["first"] + UPDATES_AFTER if "fault" in job else None
    deadline = time.monotonic() + CORRECT_SECONDS
    alarm = None
    try:
        while sentinel.updates < last if last is not None else time.monotonic() < deadline:
            sentinel()
    except SentinelError as error:
        alarm = str(error)
    return {
        "alarm": alarm, "updates": sentinel.updates, "checked": sentinel.checked, "share": sentinel.seconds /
        max(1e-9, sentinel._clock() - sentinel._started),
    }  # fmt: skip


def table():
    """Prints what was detected, and false alarms."""
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    late = [record for record in records if "fault" in record]
    correct = [record for record in records if "stage" in record]
    detected = [record for record in late if record["alarm"]]
    print(f"late faults: {len(detected)} of {len(late)} detected")
    delays = sorted(record["updates"] - record["first"] for record in detected)
    if delays:
        print(f"updates until the alarm: median {delays[len(delays) // 2]:,}, at most {delays[-1]:,}")
    print("missed:", Counter((record["recipe"], record["fault"]) for record in late if not record["alarm"]))
    alarms = [record for record in correct if record["alarm"]]
    print(f"correct trainings: {len(alarms)} alarms in {len(correct)}")
    for record in alarms:
        print(f"  {record['name']}: {record['alarm'][:200]}")
    print(f"largest share of the time without an alarm: {max(record['share'] for record in correct):.2%}")
    print(f"updates compared: {sum(record['checked'] for record in records):,}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("late", "correct", "table"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(train(json.loads(arguments.job))))
        return
    if arguments.kind == "table":
        table()
        return
    known = {json.loads(line)["name"] for line in RESULTS.read_text().splitlines()} if RESULTS.exists() else set()
    for name, job in jobs(arguments.kind):
        if name in known:
            continue
        command = [sys.executable, __file__, arguments.kind, "--job", json.dumps(job)]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if process.returncode:
            print(f"{name}: {process.stderr[-2000:]}", file=sys.stderr)
            continue
        record = {"name": name, **job, **json.loads(process.stdout.splitlines()[-1])}
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


if __name__ == "__main__":
    main()
