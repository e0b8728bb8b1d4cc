"""Trains ``conv_classifier`` at full length with every stage, one at a time.

    python experiments/conv_classifier/stages.py --jobs 2
    python experiments/conv_classifier/stages.py --report

A training has one thread and takes about 75 seconds of processor time. ``stages.json`` is
written after every training, and a training that it contains is not repeated: after an
interruption the same command continues. ``--report`` prints the table.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import runner
from runner import RunnerError
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.pipeline import assemble

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from seeds import Results, SeedStudy  # noqa: E402

RESULTS = HERE / "stages.json"
RECIPE = HERE.parents[1] / "recipes" / "conv_classifier.yaml"
BASELINE = "no stage"
SEEDS = (0, 1, 2)
DIRECTIONS = ("forward", "backward_data", "backward_weight")
WITHOUT = {"optimization.heap_retention": "off"}
"""The recipe without its stage."""
SEARCH = {"optimization.algorithm_search": "on"}
IM2COL = {"optimization.conv_backend": "on"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "conv_backend": {
        f"conv_backend: {name}": {"optimization.conv_backend": dict.fromkeys(DIRECTIONS, name)}
        for name in ("im2col", "channels_last", "winograd", "fft", "onednn_off")
    },
    # A collection of garbage after every update takes longer than the update.
    "delete_tensors": {"delete_tensors": {"optimization.delete_tensors": {"every": 20}}},
    "plan_cache": {"plan_cache, algorithm_search": {**SEARCH, "optimization.plan_cache": "on"}},
    "workspace_pool": {"workspace_pool, im2col": {**IM2COL, "optimization.workspace_pool": "on"}},
    "gradient_accumulation": {"gradient_accumulation": {"optimization.gradient_accumulation": {"micro_batch": 16}}},
    "batch_autotune": {"batch_autotune": {"optimization.batch_autotune": {"largest": 128}}},
}
"""Variants of the stages that do nothing here without a setting or another stage: overrides by name."""


def variants() -> dict[str, dict[str, Any]]:
    """Returns the overrides of the recipe by the variant's name."""
    registry = Registry()
    overrides: dict[str, dict[str, Any]] = {BASELINE: {}}
    for kind in registry.kinds("optimization"):
        kinds = [*registry.get("optimization", kind).requires, kind]
        switches = {f"optimization.{name}": "on" for name in kinds}
        overrides |= SETTINGS.get(kind, {kind: switches})
    return {name: {**WITHOUT, **changes} for name, changes in overrides.items()}


def train(variant: str, seed: int) -> dict[str, Any]:
    """Trains in this process.

    Returns:
        The held-out accuracy and the seconds of processor time; or why the stage does not take part,
        which is known before the training.
    """
    overrides = {"seed": seed, "tracking.system_metrics": False, **variants()[variant]}
    reason = reason_for_absence(overrides)
    if reason:
        return {"absent": reason}
    started = time.process_time()
    metrics = runner.train(RECIPE, set=overrides).metrics
    return {
        "accuracy": metrics["eval/accuracy"],
        "loss": metrics["eval/loss"],
        "cpu_seconds": round(time.process_time() - started),
    }


def reason_for_absence(overrides: dict[str, Any]) -> str:
    """Returns why a stage of a recipe is refused or inactive, or an empty text."""
    settings = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    try:
        assembly = assemble(load(RECIPE, settings, Registry()))
    except RunnerError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    return next((report.reason for report in assembly.reports.values() if not report.active), "")


def report(results: Results) -> None:
    """Prints the accuracy of every variant over seeds, and why the others did not take part."""
    print("| stage | accuracy by seed, % | mean | CPU-seconds |\n|---|---|---|---|")
    absent = {}
    for variant in variants():
        runs = [results[key] for seed in SEEDS if (key := f"{variant}, seed {seed}") in results]
        trained = [run for run in runs if "accuracy" in run]
        if runs and not trained:
            absent[variant] = runs[0]["absent"]
        if trained:
            accuracies = [100 * run["accuracy"] for run in trained]
            seconds = statistics.median(run["cpu_seconds"] for run in trained)
            texts = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
            print(f"| {variant} | {texts} | {statistics.mean(accuracies):.1f} | {seconds:.0f} |")
    print("\n| stage | why it does not take part |\n|---|---|")
    for variant, reason in absent.items():
        print(f"| {variant} | {reason} |")


if __name__ == "__main__":
    SeedStudy(__file__, __doc__ or "", [*variants()], SEEDS, RESULTS, train, report).main()
