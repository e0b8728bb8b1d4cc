"""Times networks in float32, with int8 of dynamic ranges, and with int8 of static ranges.

    python experiments/static_int8/measure.py

Each recipe is trained for a short time, and its network is replaced by programs of ONNX Runtime:
in float32 (``export``), with ranges of every call, and with fixed ranges of some training
batches. All are timed alternately in one process with one thread, and evaluated on the same
held-out data. Writes result.json and README.md.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import runner
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.hardware import cpu_model
from runner.training.evaluation import evaluated
from runner.training.inference_model import InferenceModel, build
from runner.training.trained_run import trained
from runner.verify.evaluation_checks import resized

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from speed import speed  # noqa: E402

SIZES = (1, 16)
"""Inputs of a call."""


class Case(NamedTuple):
    """A recipe.

    Attributes:
        recipe: Its name.
        settings: Of its training.
        metric: Of its objective.
        share: Of the training batches that show the ranges.
    """

    recipe: str
    settings: Mapping[str, Any]
    metric: str
    share: float

    def variants(self) -> dict[str, list[str]]:
        """Returns the settings of each model by its name."""
        calibration = f"{{data: train, share: {self.share}}}"
        return {
            "network": [],
            "float32": ["inference.export=on"],
            "dynamic int8": ["inference.quantise=on"],
            "static int8": [f"inference.quantise={{calibration: {calibration}}}"],
        }


CASES = (
    Case("digits_classifier", {}, "accuracy", 0.1),
    Case("shakespeare_gpt", {"train.tokens": 1_000_000}, "nats_per_character", 0.0005),
    Case("grasp_cvae", {"train.updates": 300, "train.evaluate_every": 300}, "matched_mm", 0.1),
)


def main() -> None:
    """Measures all cases."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as workspace:
        os.environ["RUNNER_WORKSPACE"] = workspace
        rows = [row for case in CASES for row in rows_of(case)]
    result = {
        "date": str(datetime.date.today()),
        "machine": f"{cpu_model()}, 1 thread, torch {torch.__version__}",
        "vnni": "vnni" in Path("/proc/cpuinfo").read_text(),
        "rows": rows,
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "README.md").write_text(page(result))


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Trains a recipe and returns the measurements of its variants, but for the network itself."""
    settings = {"device": "cpu", "tracking.system_metrics": False, **case.settings}
    run = runner.train(case.recipe, set=settings).run_dir
    models = {name: model_of(str(run), case.recipe, sets) for name, sets in case.variants().items()}
    values = {name: evaluated(model.pipeline)[case.metric] for name, model in models.items()}
    network = models["network"]
    rows = []
    for name, model in list(models.items())[1:]:
        row = {
            "recipe": case.recipe,
            "metric": case.metric,
            "network": values["network"],
            "variant": name,
            "value": values[name],
            "bytes": model.bytes / network.bytes,
            "speed": {size: speed_of(network, model, size) for size in SIZES},
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def model_of(run: str, recipe: str, sets: Sequence[str]) -> InferenceModel:
    """Returns the trained model with stages for inference."""
    registry = Registry()
    return build(trained(run).under(load(recipe, sets, registry)))


def speed_of(network: InferenceModel, model: InferenceModel, size: int) -> list[float]:
    """Returns by which factor a model answers sooner than the network, with the ends of its interval."""
    source = network.pipeline.source
    batch = next(iter(source.held_out_batches()))
    resized_batch = next(resized(source, batch, [size]))
    inputs = network.learner.inputs(resized_batch)
    with network.learner.evaluating(), torch.inference_mode():
        ratio = speed(partial(network.answer, inputs), partial(model.answer, inputs))
    return [ratio.value, ratio.low, ratio.high]


def page(result: Mapping[str, Any]) -> str:
    """Returns the text of README.md."""
    shares = ", ".join(f"`{case.recipe}` {case.share:.2%}" for case in CASES)
    with_vnni = "with" if result["vnni"] else "without"
    lines = [
        "# What is int8 with fixed ranges worth?",
        "",
        "    pip install -c constraints.txt -e '.[inference]'",
        "    python experiments/static_int8/measure.py",
        "",
        "Recipes are trained for a short time. Then ONNX Runtime computes their network in float32",
        "(`inference.export`), and with weights and inputs of matrices in eight bits (`inference.quantise`):",
        "with ranges of every call (dynamic), or of a share of the training batches",
        f"({shares}; `calibration`, static).",
        "A network with convolutions is always static, with the ranges of eight batches unless `calibration` names",
        "others. Speeds are answers per second divided by those of torch's network: above 1 is faster (21 rounds of",
        f"one process, interleaved, 95 %). The processor is {with_vnni} VNNI. Bytes are a share of the network's.",
        "",
        "| recipe | program | speed, 1 input | speed, 16 inputs | bytes | metric | torch | program |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        speeds = [f"{value:.2f}x [{low:.2f}, {high:.2f}]" for value, low, high in row["speed"].values()]
        cells = [
            f"`{row['recipe']}`",
            row["variant"],
            *speeds,
            f"{row['bytes']:.2f}",
            row["metric"],
            f"{row['network']:.4f}",
            f"{row['value']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{result['date']}, {result['machine']}.", ""])


if __name__ == "__main__":
    main()
