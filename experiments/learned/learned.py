"""Trains recipes with several seeds, as they are and with single settings changed.

    python experiments/learned/learned.py --jobs 2
    python experiments/learned/learned.py --report

The metric is that of the test part for the checkpoint that is the best on the validation part, or
that of the last evaluation where a recipe has no test part. Trainings of a seed have the same
initial weights and the same parts of the data, so differences are paired. Every training has one
thread. ``results.json`` is written after every training, and a training that it contains is not
repeated: after an interruption the same command continues. ``--report`` writes README.md.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import runner
from runner.system.hardware import cpu_model
from runner.system.interval import student

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from seeds import Results, SeedStudy  # noqa: E402

SEEDS = (0, 1, 2)
RECIPE = "recipe"
"""Name of the variant without changes."""
Settings = Mapping[str, Any]
OPTIMIZERS: dict[str, Settings] = {
    "Adam": {"optimizer.kind": "adam"},
    "constant learning rate": {"lr_scheduler": {"kind": "constant"}},
    "one cycle": {"lr_scheduler": {"kind": "one_cycle"}},
}
GRAPH_OPTIMIZERS: dict[str, Settings] = {
    "AdamW": {"optimizer.kind": "adamw"},
    "cosine": {"lr_scheduler": {"kind": "cosine"}},
    "one cycle": {"lr_scheduler": {"kind": "one_cycle"}},
}
"""Of a recipe that has Adam and a constant learning rate."""
HYBRID: dict[str, Settings] = {
    "hybrid sampling": {"data.sampling": {"kind": "hybrid", "uniform": 0.5, "hard": 0.3, "rare": 0.2}}
}
SMALL: Settings = {
    "data.synthetic": True,
    "data.split": 0,
    "model.layers": 2,
    "model.width": 32,
    "train.updates": 300,
    "train.evaluate_every": 300,
}


class Case(NamedTuple):
    """A recipe and its variants.

    Attributes:
        recipe: Name of the recipe.
        metric: Metric that is compared.
        settings: Settings of all variants, by path.
        variants: Changed settings by variant.
    """

    recipe: str
    metric: str
    settings: Settings
    variants: Mapping[str, Settings]


CASES = {
    "digits": Case("digits_classifier", "accuracy", {}, HYBRID),
    "synthetic molecules": Case("gps_esol", "rmse", SMALL, HYBRID),
    "Cora": Case("gcn_cora", "accuracy", {}, GRAPH_OPTIMIZERS),
    "Citeseer": Case("gcn_cora", "accuracy", {"data.file": "citeseer.npz"}, {}),
    "Cora in parts": Case("emma_cora", "accuracy", {}, {}),
    "contexts of Cora": Case("pgt_cora", "accuracy", {}, {}),
    "ESOL": Case("gps_esol", "rmse", {}, OPTIMIZERS),
    "ESOL by scaffold": Case("gps_esol", "rmse", {"data.split_by": "scaffold"}, {}),
    "walks of ESOL": Case("graphgpt_esol", "rmse", {}, {}),
    "FreeSolv": Case("gps_esol", "rmse", {"data.file": "freesolv.csv"}, {}),
    "recall": Case("recall_gpt", "accuracy", {}, {}),
    "text": Case("shakespeare_gpt", "nats_per_character", {}, OPTIMIZERS),
    "grasps of unseen shapes": Case("grasp_diffusion", "unseen_strict", {"data.kind": "shape_grasps"}, {}),
}


def train(name: str, seed: int) -> dict[str, Any]:
    """Trains in this process; returns the metric, its part and the circumstances."""
    case_name, _, variant = name.partition(": ")
    case = CASES[case_name]
    overrides = {"seed": seed, "device": "cpu", "tracking.system_metrics": False, **case.settings}
    overrides |= {} if variant == RECIPE else case.variants[variant]
    started = time.process_time()
    metrics = runner.train(case.recipe, set=overrides).metrics
    part = "test" if f"test/{case.metric}" in metrics else "eval"
    return {
        "value": metrics[f"{part}/{case.metric}"],
        "part": "test" if part == "test" else "validation",
        "metrics": {key: value for key, value in metrics.items() if key.startswith(("eval/", "test/"))},
        "cpu_seconds": round(time.process_time() - started),
        "date": str(datetime.date.today()),
        "machine": f"{cpu_model()}, 1 thread",
    }


def report(results: Results) -> None:
    """Writes README.md with the mean of every variant and its difference from the recipe."""
    lines = [
        "# What do the recipes learn, and what do single settings change?",
        "",
        "    python experiments/learned/learned.py --jobs 2",
        "",
        "Three seeds each. The metric is that of the test part for the checkpoint that is the best on the",
        "validation part, or that of the last evaluation where the data have no test part. Differences are",
        "those of pairs with the same seed. Brackets are Student's 95 % interval over seeds, which contains",
        "another split of the molecules for every seed.",
        "",
        "| data | recipe | metric | part | variant | values | mean | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        for variant in (RECIPE, *case.variants):
            row = table_row(name, case, variant, results)
            if row:
                lines.append(row)
    lines += more_seeds(results)
    dates = sorted({result["date"] for result in results.values()})
    machines = sorted({result["machine"] for result in results.values()})
    lines += ["", f"{', '.join(dates)}; {', '.join(machines)}.", ""]
    (HERE / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))


def more_seeds(results: Results) -> list[str]:
    """Returns a list of the variants that were compared with the recipe by more than ``SEEDS``."""
    lines = []
    for name, case in CASES.items():
        recipe = values_by_seed(results, f"{name}: {RECIPE}")
        for variant in case.variants:
            changed = values_by_seed(results, f"{name}: {variant}")
            common = sorted(recipe.keys() & changed.keys())
            if len(common) <= len(SEEDS):
                continue
            means = [fmean(values[seed] for seed in common) for values in (changed, recipe)]
            mean, low, high = student([changed[seed] - recipe[seed] for seed in common])
            lines += [
                f"* {name}, {variant}, {len(common)} seeds: {case.metric} {means[0]:.3f}, that of the recipe",
                f"  {means[1]:.3f}; difference {mean:+.3f} [{low:+.3f}, {high:+.3f}].",
            ]
    return ["", "With more seeds:", "", *lines] if lines else []


def values_by_seed(results: Results, name: str) -> dict[int, float]:
    """Returns the metric of a variant for all seeds that were trained."""
    start = f"{name}, seed "
    return {int(key.removeprefix(start)): run["value"] for key, run in results.items() if key.startswith(start)}


def table_row(name: str, case: Case, variant: str, results: Results) -> str:
    """Returns the row of a variant; empty if it was not trained."""
    runs = runs_of(results, f"{name}: {variant}")
    if not runs:
        return ""
    values = {seed: run["value"] for seed, run in runs.items()}
    own_recipe = runs_of(results, f"{name}: {RECIPE}")
    pairs = [value - own_recipe[seed]["value"] for seed, value in values.items() if seed in own_recipe]
    difference = "" if variant == RECIPE else interval(pairs, "+.3f")
    cells = [
        name,
        f"`{case.recipe}`",
        case.metric,
        " and ".join(sorted({run["part"] for run in runs.values()})),
        variant,
        ", ".join(f"{value:.3f}" for value in values.values()),
        interval(list(values.values()), ".3f", case.metric == "accuracy"),
        difference,
    ]
    return f"| {' | '.join(cells)} |"


def runs_of(results: Results, name: str) -> dict[int, dict[str, Any]]:
    """Returns the results of a variant by seed."""
    keys = {seed: f"{name}, seed {seed}" for seed in SEEDS}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def interval(values: list[float], form: str, is_share: bool = False) -> str:
    """Returns a mean with its interval; without one where seeds are missing."""
    if len(values) != len(SEEDS):
        return f"{fmean(values):{form}} ({len(values)} seeds)" if values else ""
    mean, low, high = student(values).clipped(0, 1) if is_share else student(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


if __name__ == "__main__":
    names = [f"{name}: {variant}" for name, case in CASES.items() for variant in (RECIPE, *case.variants)]
    SeedStudy(__file__, __doc__ or "", names, SEEDS, HERE / "results.json", train, report).main()
