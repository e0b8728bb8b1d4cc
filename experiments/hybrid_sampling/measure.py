"""Trains recipes with uniform and with hybrid sampling, three seeds each.

python experiments/hybrid_sampling/measure.py

Both trainings of a seed have the same initial weights, number of updates and held-out samples. The
tables are the trained metrics of the last evaluation.
"""

import argparse
import datetime
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.hardware import cpu_model
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Step

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
QUANTILE = 4.303
"""Of Student's distribution with two degrees of freedom, 97.5 %."""
Settings = dict[str, Any]
CASES: dict[str, tuple[str, str, Settings]] = {
    "digits": ("digits_classifier", "accuracy", {}),
    "molecules": (
        "gps_esol",
        "rmse",
        {
            "data.synthetic": True,
            "data.split": 0,
            "model.layers": 2,
            "model.width": 32,
            "train.updates": 300,
            "train.evaluate_every": 300,
        },
    ),
}
"""By name: the recipe, the metric, and settings."""
SAMPLING: dict[str, Any] = {
    "uniform": "random",
    "hybrid": {"kind": "hybrid", "uniform": 0.5, "hard": 0.3, "rare": 0.2},
}


def trained(recipe: str, metric: str, settings: Settings, sampling: Any, seed: int) -> float:
    """Returns the metric of the last evaluation of a training."""
    sets = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
    sets += [f"data.sampling={json.dumps(sampling)}", f"seed={seed}", "device=cpu"]
    pipeline = assemble(load(recipe, sets, Registry()))
    step = Step(pipeline)
    while pipeline.progress.fraction < 1:
        step()
    return float(evaluated(pipeline)[metric])


def interval(values: list[float]) -> tuple[float, float, float]:
    """Returns the mean of three values and its 95 % interval."""
    mean = fmean(values)
    half = QUANTILE * stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    """Trains all cases and writes ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    chosen = parser.parse_args().cases
    file = FOLDER / "results.json"
    result = json.loads(file.read_text()) if file.exists() else {"cases": {}}
    result |= {"date": str(datetime.date.today()), "machine": f"{cpu_model()}, 1 thread"}
    for name in chosen:
        recipe, metric, settings = CASES[name]
        values: dict[str, list[float]] = {sampling: [] for sampling in SAMPLING}
        for seed in SEEDS:
            for sampling, setting in SAMPLING.items():
                values[sampling].append(trained(recipe, metric, settings, setting, seed))
        differences = [hybrid - uniform for uniform, hybrid in zip(*values.values(), strict=True)]
        result["cases"][name] = {
            "recipe": recipe,
            "metric": metric,
            "settings": settings,
            **values,
            "difference": interval(differences),
        }
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
