"""What the flagship learns as it ships: trains both recipes with several seeds and numbers of followers.

    python experiments/marl_learning/flagship.py --jobs 2
    python experiments/marl_learning/flagship.py --report
    python experiments/marl_learning/flagship.py --set data.obstacles.count=12 data.obstacles.speed=20 --results FILE

Every training has one thread. Its last weights then fly 2,000 fresh flights. ``flagship.json`` is written after every
training, and a training that it contains is not repeated.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from pilot import FLIGHTS, fly, pilots_for

import runner
from runner.plugins.marl.uav.config import ObstaclesConfig
from runner.system.plots import BLUE, GREEN, ORANGE, VERMILLION, draw_all, legend
from runner.training.result import RunResult

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from seeds import ResultFile, cells, result_of_child  # noqa: E402

RESULTS = HERE / "flagship.json"
RECIPES = ("marl_phase3", "marl_phase2")
FOLLOWERS = (3, 1, 2, 4)
SEEDS = tuple(range(1, 9))
FIRST_FLIGHT = 1_000_000
"""Seed of the pilot's flights. Those of a training follow from this and its own seed."""
COLUMNS = {
    "success_rate": "success",
    "collision_rate": "collisions",
    "steps_to_goal": "steps to the goal",
    "formation_rate": "formation mean",
    "formation_strict": "formation strict",
}
FORMS = {name: "{:.1f}" if name == "steps_to_goal" else "{:.1%}" for name in COLUMNS}
COLOURS = dict(zip(sorted(FOLLOWERS), (BLUE, ORANGE, GREEN, VERMILLION), strict=True))


class Job(NamedTuple):
    """One training."""

    recipe: str
    followers: int
    seed: int

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.recipe}, {self.followers} followers, seed {self.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time, one thread each")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--followers", type=int, nargs="+", default=FOLLOWERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--set", nargs="+", default=[], metavar="A.B=JSON", help="settings to try; not for the table")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table and draw the curves")
    parser.add_argument("--train", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        job = Job(*json.loads(arguments.train))
        print(json.dumps(train(job, arguments.set)))
        return
    file = ResultFile(arguments.results)
    if not arguments.report:
        file.complete(jobs_of(arguments), arguments.jobs)
    report(file.results, arguments.results.parent)


def jobs_of(arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Returns the pilot's flights, and the trainings in child processes, by name."""
    jobs: dict[str, Callable[[], Any]] = {}
    obstacles = obstacles_of(overrides_of(arguments.set))
    for followers, (name, policy) in product(arguments.followers, pilots_for(obstacles).items()):
        jobs[f"{name}, {followers} followers"] = partial(fly_pilot, policy, followers, obstacles)
    settings = ["--set", *arguments.set] if arguments.set else []
    for followers, seed, recipe in product(arguments.followers, arguments.seeds, arguments.recipes):
        job = Job(recipe, followers, seed)
        command = ["--train", json.dumps(job), *settings]
        jobs[job.key] = partial(result_of_child, __file__, job.key, command)
    return jobs


def overrides_of(settings: list[str]) -> dict[str, Any]:
    """Returns the values of settings such as ``data.followers=3`` by dotted path."""
    pairs = (setting.split("=", 1) for setting in settings)
    return {path: json.loads(value) for path, value in pairs}


def obstacles_of(overrides: dict[str, Any]) -> ObstaclesConfig:
    """Returns the obstacles of a training with these settings."""
    values = dict(overrides.get("data.obstacles", {}))
    for path, value in overrides.items():
        section, _, key = path.rpartition(".")
        if section == "data.obstacles":
            values[key] = value
    return ObstaclesConfig(**values)


def fly_pilot(policy: Callable[[Any], Any], followers: int, obstacles: ObstaclesConfig) -> dict[str, Any]:
    """Returns the flights of a scripted pilot."""
    return {"flights": fly(policy, followers, FIRST_FLIGHT, obstacles)}


def train(job: Job, settings: list[str]) -> dict[str, Any]:
    """Trains in this process, and flies the last weights.

    Returns:
        ``curve`` (evaluations by environment step), ``flights``, ``seconds`` and ``cpu_seconds`` of the training.
    """
    overrides: dict[str, Any] = {"seed": job.seed, "data.followers": job.followers, "tracking.system_metrics": False}
    overrides |= overrides_of(settings)
    started = time.process_time()
    result = runner.train(job.recipe, set=overrides)
    cpu_seconds = time.process_time() - started
    learner = runner.load_model(result, "last")
    return {
        "curve": read_curve(result),
        "flights": fly(learner.predict, job.followers, FIRST_FLIGHT + job.seed, obstacles_of(overrides)),
        "seconds": round(result.seconds),
        "cpu_seconds": round(cpu_seconds),
    }


def read_curve(result: RunResult) -> dict[int, dict[str, float]]:
    """The evaluations of a run by environment step."""
    client = MlflowClient(result.tracking_uri)
    curve: dict[int, dict[str, float]] = {}
    for name in (f"eval/{column}" for column in COLUMNS):
        for point in client.get_metric_history(result.run_id, name):
            curve.setdefault(point.step, {})[name.removeprefix("eval/")] = point.value
    return curve


def report(results: dict[str, Any], folder: Path) -> None:
    """Prints the table and draws the curves into a folder."""
    print(f"| trained | followers | seeds | {' | '.join(COLUMNS.values())} |")
    print(f"|---|---|---|{'---|' * len(COLUMNS)}")
    for recipe in RECIPES:
        for followers in sorted(FOLLOWERS):
            flights = [run["flights"] for run in runs_of(results, recipe, followers)]
            if flights:
                print(f"| `{recipe}` | {followers} | {len(flights)} | {' | '.join(cells(flights, FORMS))} |")
    for key, run in sorted(results.items()):
        name, _, followers = key.partition(", ")
        if name not in RECIPES:
            print(f"| {name} | {followers.split()[0]} | | {' | '.join(cells([run['flights']], FORMS))} |")
    for recipe in RECIPES:
        if any(runs_of(results, recipe, followers) for followers in FOLLOWERS):
            draw_all({f"{recipe}_curves": (partial(draw, results, recipe), (9.0, 6.4))}, folder)


def runs_of(results: dict[str, Any], recipe: str, followers: int) -> list[dict[str, Any]]:
    """The trainings of a recipe with so many followers, in the order of their seeds."""
    start = f"{recipe}, {followers} followers, "
    return [run for key, run in sorted(results.items()) if key.startswith(start)]


def draw(results: dict[str, Any], recipe: str, canvas: Any) -> None:
    """One line for every seed, in the colour of its number of followers."""
    axes = canvas.subplots(2, 2, sharex=True)
    columns = [name for name in COLUMNS if name != "collision_rate"]
    for axis, column in zip(axes.flat, columns, strict=True):
        for followers in sorted(FOLLOWERS):
            label = f"{followers} follower{'s' * (followers > 1)}"
            for run in runs_of(results, recipe, followers):
                curve = sorted((int(step), metrics[column]) for step, metrics in run["curve"].items())
                axis.plot(*zip(*curve, strict=True), color=COLOURS[followers], linewidth=0.8, label=label)
        axis.set_title(COLUMNS[column])
        axis.xaxis.set_major_formatter("{x:,.0f}")
        if column == "steps_to_goal":
            axis.set_ylim(15, 60)
        else:
            axis.set_ylim(-0.03, 1.03)
            axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axis in axes[1]:
        axis.set_xlabel("environment steps")
    canvas.suptitle(f"{recipe}: one line for every seed, evaluated on held-out flights; then {FLIGHTS:,} fresh ones")
    legend(canvas)


if __name__ == "__main__":
    main()
