"""Flips single bits in the files of a run and of a registered model, and counts what loading them does then.

Usage: ``python experiments/stored/flip_bits.py [--flips 200] [--seed 0]``. It trains a small run in a temporary
workspace, registers its model, and keeps what the stages ``prune`` and ``export`` make of both. Every flip is undone
before the next one. The table has a row for each kind of file; the exit code is 1 if an answer was another one, or an
error was no message.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import sys
import tempfile
from pathlib import Path

OUTCOMES = ("same answer", "made again", "refused", "other answer", "traceback")
RECIPE = """\
extends: digits_classifier
name: flipped
inference:
  prune: {importance: weights, updates: 20}
  export: {format: onnx}
"""
QUESTION = {"image": [[[(row * 8 + column) % 17 / 17 for column in range(8)] for row in range(8)]]}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["RUNNER_WORKSPACE"] = f"{folder}/.runner"
        counts = flip_all(arguments.flips, random.Random(arguments.seed))
    print("| file | flips | " + " | ".join(OUTCOMES) + " |")
    print("|---|" + "---|" * (1 + len(OUTCOMES)))
    total: collections.Counter[str] = collections.Counter()
    for kind, row in sorted(counts.items()):
        print_row(kind, row)
        total += row
    print_row("all", total)
    sys.exit(bool(total["other answer"] or total["traceback"]))


def print_row(kind: str, row: collections.Counter[str]) -> None:
    """Prints one row of the table."""
    print(f"| {kind} | {row.total()} | " + " | ".join(str(row[outcome]) for outcome in OUTCOMES) + " |")


def flip_all(flips: int, numbers: random.Random) -> dict[str, collections.Counter[str]]:
    """Trains, registers, and flips bits of one file after the other; returns how often each outcome was seen."""
    import runner
    from runner.training.model_versions import register

    Path("flipped.yaml").write_text(RECIPE)
    result = runner.train("flipped.yaml", {"train.epochs": 1, "tracking.system_metrics": False})
    run = Path(result.run_dir)
    version = register(run.name, "flipped").reference
    folders = {run.name: run, version: model_folder()}
    expected = {name: answer(name) for name in folders}
    files = [
        (name, path) for name, folder in folders.items() for path in sorted(folder.rglob("*")) if path.stat().st_size
    ]
    files = [(name, path) for name, path in files if path.is_file()]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for number in range(flips):
        name, path = files[number % len(files)]
        kind = f"{'model' if name == version else 'run'}: {kind_of(path.relative_to(folders[name]))}"
        counts[kind][outcome(name, path, expected[name], numbers)] += 1
    return counts


def model_folder() -> Path:
    """Returns the folder of the registered model in the workspace."""
    return next(Path(".runner/artifacts").resolve().glob("*/models/*/artifacts"))


def kind_of(path: Path) -> str:
    """Returns the name of a file without what differs from run to run."""
    parts = ["step-*" if part.startswith("step-") else part for part in path.parts]
    parts[-1] = "*".join([parts[-1].partition("-")[0] + "-", path.suffix]) if parts[0] == "inference" else parts[-1]
    return "/".join(parts)


def outcome(name: str, path: Path, expected: list[float], numbers: random.Random) -> str:
    """Flips a random bit of a file, loads the model, and undoes the flip."""
    folder, before = path.parent, {}
    for file in [*folder.iterdir(), *path.parents[1].glob("*.json")]:
        if file.is_file():
            before[file] = file.read_bytes()
    content = bytearray(before[path])
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)
    try:
        return judge(name, expected)
    finally:
        for file, whole in before.items():
            file.write_bytes(whole)


def judge(name: str, expected: list[float]) -> str:
    """Returns what loading a model does."""
    from runner.system.errors import RunnerError

    with Warnings() as warnings:
        try:
            found = answer(name)
        except RunnerError as error:
            return "refused" if "\n" not in str(error).strip() or error.exit_code == 7 else "traceback"
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            return "traceback"
    if max(abs(left - right) for left, right in zip(found, expected, strict=True)) > 1e-6:
        return "other answer"
    return "made again" if any("made again" in text for text in warnings.texts) else "same answer"


def answer(name: str) -> list[float]:
    """Loads a model as the server does, and asks it one question."""
    from runner.plugin.registry import Registry
    from runner.serve.load import load

    model, _ = load(name, "flipped.yaml", [], Registry())
    (reply,) = model.answers([model.request(**QUESTION)])
    if isinstance(reply, Exception):
        raise reply
    return list(json.loads(reply)["probabilities"])


class Warnings(logging.Handler):
    """Collects warnings inside a ``with``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text of a warning."""
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("runner").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("runner").removeHandler(self)


if __name__ == "__main__":
    main()
