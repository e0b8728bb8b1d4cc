"""Trainings with several seeds: each in a process, results written as they come, and tables."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

Results = dict[str, Any]


class SeedStudy(NamedTuple):
    """Variants of a recipe that a script trains with several seeds.

    Attributes:
        script: Path of the script, which runs itself for every training.
        description: Of the script's help.
        variants: Names of the variants.
        seeds: Seeds that are trained by default.
        results: File of the results.
        train: Trains a variant with a seed, and returns what is stored.
        report: Prints the tables.
    """

    script: str
    description: str
    variants: Sequence[str]
    seeds: Sequence[int]
    results: Path
    train: Callable[[str, int], Any]
    report: Callable[[Results], None]

    def main(self) -> None:
        """Runs the command line of the script."""
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=self.description, formatter_class=form)
        parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
        parser.add_argument("--seeds", type=int, nargs="+", default=self.seeds)
        names = self.variants
        parser.add_argument("--variants", nargs="+", default=names, choices=names, metavar="VARIANT")
        parser.add_argument("--results", type=Path, default=self.results)
        parser.add_argument("--report", action="store_true", help="only print the tables")
        parser.add_argument("--train", metavar="JOB", help=argparse.SUPPRESS)
        arguments = parser.parse_args()
        if arguments.train:
            print(json.dumps(self.train(*json.loads(arguments.train))))
            return

        file = ResultFile(arguments.results)
        if not arguments.report:
            jobs = {}
            for seed, variant in product(arguments.seeds, arguments.variants):
                name = f"{variant}, seed {seed}"
                job = json.dumps([variant, seed])
                jobs[name] = partial(result_of_child, self.script, name, ["--train", job])
            file.complete(jobs, arguments.jobs)
        self.report(file.results)


class ResultFile:
    """Results by name in a JSON file that is written after every result."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: Results = json.loads(path.read_text()) if path.exists() else {}
        self._lock = Lock()

    def add(self, name: str, result: Any) -> None:
        """Stores a result and writes the file; threads may call it together."""
        with self._lock:
            self.results[name] = result
            text = json.dumps(self.results, indent=1, sort_keys=True)
            self.path.write_text(text + "\n")

    def complete(self, jobs: Mapping[str, Callable[[], Any]], workers: int) -> None:
        """Runs the jobs whose names have no result yet, several at a time."""

        def run(name: str) -> None:
            self.add(name, jobs[name]())
            print(name, "done", flush=True)

        missing = [name for name in jobs if name not in self.results]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, missing))


def result_of_child(script: str, name: str, arguments: Sequence[str]) -> Any:
    """Runs a script with one thread and a workspace of its own.

    Args:
        script: Path of the script; it prints its result as one line of JSON at the end.
        name: Name of the job, for the message of an error.
        arguments: Command line of the script.

    Raises:
        SystemExit: The script failed.
    """
    with tempfile.TemporaryDirectory() as workspace:
        child = subprocess.run(
            [sys.executable, script, *arguments],
            env={**os.environ, "RUNNER_WORKSPACE": workspace, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        raise SystemExit(f"{name}:\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])


def cells(runs: Sequence[Mapping[str, float]], forms: Mapping[str, str]) -> list[str]:
    """Returns the mean of every metric over runs, with the range in brackets.

    Args:
        runs: Metrics of each run.
        forms: Format strings by metric, such as ``{:.1%}``.
    """
    texts = []
    for metric, form in forms.items():
        values = [run[metric] for run in runs]
        text = form.format(statistics.mean(values))
        if len(values) > 1:
            text += f" [{form.format(min(values))}, {form.format(max(values))}]"
        texts.append(text)
    return texts
