"""Times one update of recipes with the code of two checkouts, in turns.

``python experiments/unchanged/update.py OTHER_PYTHON``: the interpreter of a virtual environment in which the other
checkout is installed. Each recipe lives in a process of its own for each checkout; blocks of updates take turns. Both
begin anew several times, because where a process finds its memory moves its times by more than what is looked for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "marl_baseline": (),
    "marl_phase3": (),
    "marl_phase3, amp off": ("optimization.amp=off",),
}
COMMON = ("model.hidden=[256, 256]", "device=cpu", "optimization.batch_autotune=off")
BLOCK_SECONDS = 0.25


def work(recipe: str, sets: list[str]) -> None:
    """Answers every line of stdin, a number of updates, with the seconds that they took."""
    import torch

    answers = sys.stdout
    sys.stdout = sys.stderr
    from runner.plugin.registry import Registry
    from runner.recipe.loader import load

    try:
        from runner.training.pipeline import assemble
        from runner.training.step import Step
    except ModuleNotFoundError:  # a checkout in which the package had its earlier name
        from runner.train.assemble import assemble
        from runner.train.step import Step

    pipeline = assemble(load(recipe, sets, Registry()))
    step = Step(pipeline)

    def draw() -> object:
        drawn = step.next()
        step.count(drawn.batch)
        return drawn

    update = step.update
    torch.manual_seed(0)
    pool = [draw() for _ in range(8)]
    for line in sys.stdin:
        started = time.perf_counter()
        for number in range(int(line)):
            update(pool[number % len(pool)])
        answers.write(f"{time.perf_counter() - started}\n")
        answers.flush()


def pair(recipe: str, sets: tuple[str, ...], pythons: dict[str, str], rounds: int) -> dict[str, float]:
    """Median milliseconds of an update in one process of each checkout."""
    children = {
        name: subprocess.Popen(
            [python, "-P", str(Path(__file__).resolve()), "--work", recipe, *COMMON, *sets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for name, python in pythons.items()
    }

    def seconds(name: str, updates: int) -> float:
        child = children[name]
        child.stdin.write(f"{updates}\n")
        child.stdin.flush()
        return float(child.stdout.readline()) / updates

    for name in children:
        seconds(name, 30)
    count = max(1, round(BLOCK_SECONDS / seconds("old", 5)))
    taken = {name: [] for name in children}
    for turn in range(rounds):
        for name in list(children)[:: 1 if turn % 2 else -1]:
            taken[name].append(1e3 * seconds(name, count))
    for child in children.values():
        child.stdin.close()
        child.wait()
    return {name: statistics.median(each) for name, each in taken.items()}


def compare(recipe: str, sets: tuple[str, ...], pythons: dict[str, str], pairs: int, rounds: int) -> dict[str, object]:
    """Milliseconds of both, and the ratio (new over old) with its interval over the pairs of processes."""
    from runner.proof.ratios import ratio  # which the old code has elsewhere

    found = [pair(recipe, sets, pythons, rounds) for _ in range(pairs)]
    old, new = ([each[name] for each in found] for name in ("old", "new"))
    speed = ratio(new, old)
    return {
        "old_ms": round(statistics.median(old), 3),
        "new_ms": round(statistics.median(new), 3),
        "new_over_old": [round(value, 4) for value in (speed.value, speed.low, speed.high)],
        "pairs": [round(own / other, 4) for other, own in zip(old, new, strict=True)],
    }


def main() -> None:
    """Prints a line for every case."""
    if sys.argv[1] == "--work":
        work(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("other", help="the interpreter of the other checkout")
    parser.add_argument("--pairs", type=int, default=8, help="of processes, for each case")
    parser.add_argument("--rounds", type=int, default=16, help="in each pair")
    options = parser.parse_args()
    for name, sets in CASES.items():
        pythons = {"old": options.other, "new": sys.executable}
        found = compare(name.partition(",")[0], sets, pythons, options.pairs, options.rounds)
        print(f"{name:24} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
