"""Runs of one recipe together and one after the other, a quiet run, and the noise of an ablation.

    python experiments/shared_machine/measure.py together   # six runs at once, and one after the other
    python experiments/shared_machine/measure.py quiet      # auto and active in turns on a quiet machine
    python experiments/shared_machine/measure.py load       # auto and active beside programs that only compute
    python experiments/shared_machine/measure.py noise      # two identical processes, as an ablation compares them
    python experiments/shared_machine/measure.py table      # README.md from results.json

``system.wait=active`` is what every run did before: torch's threads spin while they wait. Each result is written to
results.json when it is known; a measurement that was interrupted continues with what it lacks.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from runner.verify.variants import AGAIN, BASELINE

FOLDER = Path(__file__).parent
RUNNER = str(Path(sys.executable).with_name("runner"))
WAITS = ("active", "auto")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
TABLE_START = "<!-- table -->"


class Results:
    """Measurements by name, in a file that is complete after each of them.

    Args:
        path: The file, which may exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, name: str, take: Callable[[], dict]) -> dict:
        """Returns a measurement, which is taken only if the file does not have it."""
        if name not in self.values:
            load = os.getloadavg()[0]
            taken = take()
            about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load_before": load, "machine": machine()}
            self.values[name] = taken | about
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.values, indent=1) + "\n")
            partial.replace(self._path)
            print(f"{name}: {json.dumps(taken)}", flush=True)
        return self.values[name]


def machine() -> str:
    """Returns the processor and the number of cores that may be used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def start(recipe: str, folder: str, *settings: str) -> subprocess.Popen[str]:
    """Starts a run with a workspace of its own, which has two threads on two cores."""
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    environment["RUNNER_WORKSPACE"] = folder
    command = [RUNNER, "run", recipe, *settings, "--quiet", "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(run: subprocess.Popen[str], deadline: float) -> dict | None:
    """Waits for a run; returns what it printed, or None if it took too long."""
    try:
        printed, errors = run.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
        return None
    if run.returncode:
        raise RuntimeError(errors)
    return json.loads(printed)


def train_side_by_side(options: argparse.Namespace, wait: str, seeds: Sequence[int]) -> dict:
    """Trains with all of these seeds at once, in one workspace."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_workspace(folder)
        started = time.monotonic()
        settings = [*options.settings, f"system.wait={wait}"]
        runs = [start(options.recipe, folder, f"seed={seed}", *settings) for seed in seeds]
        try:
            printed = [finish(run, started + options.limit) for run in runs]
        finally:
            for run in runs:
                run.kill()
        seconds = time.monotonic() - started
    return {
        "seconds": seconds,
        "finished": sum(result is not None for result in printed),
        "update_ms": [result["metrics"]["perf/update_ms"] for result in printed if result],
        "returns": [result["metrics"]["eval/return"] for result in printed if result],
    }


def prepare_workspace(folder: str) -> None:
    """Creates the database, which takes as long as some thousand updates, before the clock starts."""
    command = "from runner.tracking import Workspace; from runner.tracking.store import Store; Store(Workspace())"
    environment = os.environ | {"RUNNER_WORKSPACE": folder}
    subprocess.run([sys.executable, "-c", command], env=environment, check=True, capture_output=True)


def measure_together(options: argparse.Namespace, results: Results) -> None:
    """Six runs at once take as long as they do one after the other, if they do not delay each other."""
    for turn in range(options.rounds):
        for wait in options.waits:
            for seed in range(options.count):
                name = f"alone {wait} {turn} {seed}"
                results.measure(name, partial(train_side_by_side, options, wait, [seed]))
            name = f"together {wait} {turn}"
            results.measure(name, partial(train_side_by_side, options, wait, list(range(options.count))))


def measure_quiet(options: argparse.Namespace, results: Results) -> None:
    """Runs in turns, so that a machine that changes its speed favours none."""
    for turn in range(options.rounds):
        for wait in options.waits if turn % 2 else reversed(options.waits):
            results.measure(f"quiet {wait} {turn}", partial(train_side_by_side, options, wait, [0]))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    code = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_load(options: argparse.Namespace, results: Results) -> None:
    """A run beside programs that need the cores."""
    for wait in options.waits:
        results.measure(f"load {wait} {options.busy}", partial(train_beside_others, options, wait))


def train_beside_others(options: argparse.Namespace, wait: str) -> dict:
    """Trains once while other processes compute."""
    with busy(options.busy):
        return train_side_by_side(options, wait, [0])


def measure_noise(options: argparse.Namespace, results: Results) -> None:
    """An ablation of one stage; the ratio of its two identical baselines should be 1."""
    for turn in range(options.rounds):
        for wait in options.waits if turn % 2 else reversed(options.waits):
            for count in (0, options.busy):
                name = f"noise {wait} {count} {turn}"
                results.measure(name, partial(baseline_ratio, options, wait, count))


def baseline_ratio(options: argparse.Namespace, wait: str, count: int) -> dict:
    """Runs an ablation beside so many busy processes; returns the baselines' ratio in every round."""
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    with tempfile.TemporaryDirectory() as folder, busy(count):
        environment["RUNNER_WORKSPACE"] = folder
        command = [RUNNER, "ablate", "marl_baseline", "optimization={forward_cache: on}", f"system.wait={wait}"]
        command += ["--budget", str(options.budget), "--out", f"{folder}/out", "--quiet", "--json"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = Path(folder, "out", "rounds.jsonl")
        lines = log.read_text().splitlines() if log.exists() else []
    rounds = [entry for entry in map(json.loads, lines) if "update" in entry]
    if not rounds:
        raise RuntimeError(ended.stderr)
    pairs = [(entry["update"][BASELINE], entry["update"][AGAIN]) for entry in rounds]
    ratios = [first / second for first, second in pairs]
    return {
        "exit_code": ended.returncode,
        "rounds": len(ratios),
        "update_ms": 1e3 * statistics.median(seconds for pair in pairs for seconds in pair),
        "ratio": statistics.median(ratios),
        "spread": statistics.stdev(ratios),
        "passive_rounds": sum(entry.get("wait") == "passive" for entry in rounds),
    }


def summarize(values: dict[str, dict]) -> str:
    """Returns the tables of the README."""
    return "\n".join([*together_table(values), "", *speed_table(values), "", *noise_table(values)])


def together_table(values: dict[str, dict]) -> list[str]:
    """Six runs at once, and the same six one after the other."""
    lines = ["| `system.wait` | round | one after the other | together | together / one after the other | finished |"]
    lines.append("|---|---|---|---|---|---|")
    for name, together in values.items():
        kind, wait, *turn = name.split()
        if kind != "together":
            continue
        prefix = f"alone {wait} {turn[0]} "
        alone = [taken["seconds"] for other, taken in values.items() if other.startswith(prefix)]
        bound = "" if together["finished"] == len(alone) else "over "
        ratio = f"{bound}{together['seconds'] / sum(alone):.2f}"
        cells = [f"`{wait}`", turn[0], f"{sum(alone):.0f} s", f"{bound}{together['seconds']:.0f} s", ratio]
        lines.append(f"| {' | '.join(cells)} | {together['finished']} of {len(alone)} |")
    return lines


def speed_table(values: dict[str, dict]) -> list[str]:
    """Single runs: on the machine as it is, and beside programs that only compute."""
    lines = ["| run | `system.wait` | seconds | ms per update |", "|---|---|---|---|"]
    groups: dict[tuple[str, str], list[dict]] = {}
    for name, taken in values.items():
        kind, wait, *rest = name.split()
        if kind in ("quiet", "load"):
            about = "alone" if kind == "quiet" else f"beside {rest[0]} busy processes"
            groups.setdefault((about, wait), []).append(taken)
    for (about, wait), taken in sorted(groups.items()):
        updates = [milliseconds for result in taken for milliseconds in result["update_ms"]]
        seconds = statistics.median(result["seconds"] for result in taken)
        bound = "" if updates else "over "
        milliseconds = f"{statistics.median(updates):.1f}" if updates else "not finished"
        lines.append(f"| {about} | `{wait}` | {bound}{seconds:.0f} | {milliseconds} |")
    return lines


def noise_table(values: dict[str, dict]) -> list[str]:
    """The ratio of two identical processes in the rounds of an ablation."""
    lines = ["| busy processes | `system.wait` | ms per update | rounds | ratio | standard deviation |"]
    lines.append("|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], list[dict]] = {}
    for name, taken in values.items():
        kind, wait, *rest = name.split()
        if kind == "noise":
            groups.setdefault((rest[0], wait), []).append(taken)
    for (count, wait), taken in sorted(groups.items()):
        numbers = [
            f"{statistics.median(result['update_ms'] for result in taken):.1f}",
            f"{sum(result['rounds'] for result in taken)}",
            f"{statistics.median(result['ratio'] for result in taken):.3f}",
            f"{statistics.median(result['spread'] for result in taken):.3f}",
        ]
        lines.append(f"| {count} | `{wait}` | {' | '.join(numbers)} |")
    return lines if groups else []


def write_table(_options: argparse.Namespace, results: Results) -> None:
    """Replaces everything below the mark in the README."""
    readme = FOLDER / "README.md"
    text = readme.read_text().partition(TABLE_START)[0]
    readme.write_text(f"{text}{TABLE_START}\n\n{summarize(results.values)}\n")


MEASUREMENTS = {
    "together": measure_together,
    "quiet": measure_quiet,
    "load": measure_load,
    "noise": measure_noise,
    "table": write_table,
}


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--recipe", default="marl_phase2")
    parser.add_argument("--settings", nargs="*", default=["train.env_steps=2000", "data.warmup=400"])
    parser.add_argument("--count", type=int, default=6, help="runs at once")
    parser.add_argument("--busy", type=int, default=4, help="processes that only compute")
    parser.add_argument("--waits", nargs="*", choices=WAITS, default=WAITS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for one measurement")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of an ablation")
    parser.add_argument("--results", type=Path, default=FOLDER / "results.json")
    options = parser.parse_args()
    # Ends what was started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    MEASUREMENTS[options.measurement](options, Results(options.results))


if __name__ == "__main__":
    main()
