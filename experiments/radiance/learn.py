"""Trains the radiance-field GAN with several seeds, and without each of its settings.

    python experiments/radiance/learn.py --jobs 2
    python experiments/radiance/learn.py --report

Every training has one thread and takes about nine minutes of processor time. ``learned.json`` is
written after every training, and a training that it contains is not repeated: after an interruption
the same command continues. ``--report`` prints the tables.
"""

import sys
import time
from pathlib import Path
from typing import Any

import runner

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from seeds import Results, SeedStudy, cells  # noqa: E402

RESULTS = HERE / "learned.json"
RECIPE = "graf"
SEEDS = (0, 1, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "graf": {},
    "beta-distributed patch scales": {"model.patch_scale": "beta"},
    "importance samples": {"model.samples": 12, "model.importance_samples": 12},
    "RMSprop": {},
    "no positions for the discriminator": {"model.condition": ["class", "pose"]},
    "latent vectors around 0": {"model.latent_mean": 0.0, "model.latent_deviation": 1.0},
}
RECIPES = {"RMSprop": HERE / "rmsprop.yaml"}
"""Recipes of variants whose keys differ from those of ``graf``."""
COLUMNS = {
    "swd": "{:.0f}",
    "psnr": "{:.1f}",
    "iou_spot": "{:.2f}",
    "iou_fuze": "{:.2f}",
    "iou_mug": "{:.2f}",
    "pose_control": "{:.2f}",
    "label_control": "{:.2f}",
    "sr_gain": "{:.1f}",
    "sr_residual": "{:.3f}",
}


def train(variant: str, seed: int) -> dict[str, float]:
    """Trains in this process; returns the last evaluation and the seconds of processor time."""
    overrides = {"seed": seed, "tracking.system_metrics": False, **VARIANTS[variant]}
    started = time.process_time()
    result = runner.train(RECIPES.get(variant, RECIPE), set=overrides)
    metrics = result.metrics
    values = {name: round(metrics[f"eval/{name}"], 4) for name in COLUMNS}
    return {**values, "cpu_seconds": round(time.process_time() - started)}


def report(results: Results) -> None:
    """Prints the mean of every metric over seeds, with its range."""
    print(f"| | seeds | {' | '.join(f'`{name}`' for name in COLUMNS)} |")
    print(f"|---|---|{'---|' * len(COLUMNS)}")
    for variant in VARIANTS:
        runs = [run for key, run in results.items() if key.startswith(f"{variant}, seed ")]
        if runs:
            print(f"| {variant} | {len(runs)} | {' | '.join(cells(runs, COLUMNS))} |")


if __name__ == "__main__":
    SeedStudy(__file__, __doc__ or "", list(VARIANTS), SEEDS, RESULTS, train, report).main()
