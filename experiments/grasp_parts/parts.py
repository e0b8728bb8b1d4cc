"""Trains the default recipe of grasps and variants with one change each, three seeds of each.

python experiments/grasp_parts/parts.py             # continues where it stopped
python experiments/grasp_parts/parts.py --table     # writes README.md

One line is appended to ``results.jsonl`` for every result. Trainings with the same seed have the
same initial weights of the common parameters, scenes and noise, so that differences are paired; the
noise and the transformer of ``latent`` have another shape, so that only its scenes are the same.
The trained models of the default recipe also get students that answer in one and two evaluations,
and the same number of steps of DDIM to compare them with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from runner.api import Pipeline
from runner.plugin.registry import Registry
from runner.plugins.grasps.chamfer import chamfer
from runner.plugins.grasps.stages.consistency import ConsistencyConfig
from runner.plugins.grasps.stages.ddim import DdimConfig
from runner.recipe.loader import load
from runner.system.hardware import cpu_model
from runner.system.interval import student
from runner.tracking import Workspace
from runner.training.evaluation import evaluated
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.step import Step

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
UPDATES = 2_000
"""Of all variants except one; the recipe has 3,000."""
METRICS = ("strict", "valid", "q1", "diversity_mm", "unseen_strict")
PARTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "pyramid": ("model.encoder=pyramid",),
    "chamfer": ("model.chamfer=1",),
    "task_weights": ("model.task_weights=learned",),
    "contrastive": (),
    "3,000 updates": ("train.updates=3000",),
    "constant learning rate": ("lr_scheduler={kind: constant}",),
    "layer decay": ("optimizer.layer_decay=0.65",),
    "table, all points alike": ("model.straighten=false", "data.table.object_share=null"),
    "table, 60 % on the object": ("model.straighten=false", "data.table.object_share=0.6"),
    "augmentation": ("data.augment.degrees=15",),
    "flow": ("model.process=flow", "model.sampler=ddim"),
    "latent": ("model.kind=grasp_latent",),
}
"""Settings of every variant; ``contrastive`` starts with the encoder of a run of its own."""
STAGES = {
    "consistency, 1 evaluation": ConsistencyConfig(steps=1),
    "consistency, 2 evaluations": ConsistencyConfig(steps=2),
    "ddim, 1 evaluation": DdimConfig(steps=1, eta=1.0),
    "ddim, 2 evaluations": DdimConfig(steps=2, eta=1.0),
}
"""Samplers of the trained default models, by name."""
TIME = "time of the Chamfer term"
ROUNDS = 31


def main() -> None:
    """Runs the command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="PATH=VALUE")
    parser.add_argument("--student-updates", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", action="store_true", help="only write README.md")
    arguments = parser.parse_args()
    file = arguments.folder / "results.jsonl"
    if not arguments.table:
        students = arguments.student_updates
        measure(file, arguments.parts, arguments.seeds, arguments.sets, students)
    (arguments.folder / "README.md").write_text(report(read(file)))


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the results that are stored."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def measure(file: Path, parts: Sequence[str], seeds: Sequence[int], sets: Sequence[str], students: int) -> None:
    """Appends the missing results to the file; students are trained for ``students`` updates."""
    existing = {(result["part"], result["seed"]) for result in read(file)}

    def add(part: str, seed: int | None, values: Mapping[str, Any]) -> None:
        if (part, seed) in existing:
            return
        facts = {"part": part, "seed": seed, **values}
        facts |= {"date": str(datetime.date.today()), "machine": f"{cpu_model()}, 1 thread"}
        with file.open("a") as lines:
            lines.write(json.dumps(facts) + "\n")
        print(json.dumps(facts), flush=True)

    torch.set_num_threads(1)
    if (TIME, None) not in existing:
        add(TIME, None, chamfer_times())
    for seed in seeds:
        for part in parts:
            names = {part, *STAGES} if part == "default" else {part}
            if all((name, seed) in existing for name in names):
                continue
            with tempfile.TemporaryDirectory() as workspace:
                os.environ["RUNNER_WORKSPACE"] = workspace
                for name, values in trained(part, seed, sets, Path(workspace), students):
                    add(name, seed, values)


def trained(
    part: str, seed: int, sets: Sequence[str], workspace: Path, students: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trains a variant, and yields the results of the last weights by name."""
    registry = Registry()
    common = [f"seed={seed}", "device=cpu", *sets]
    settings = [*common, *PARTS[part]]
    if part == "contrastive":
        # Settings of a sampling or a transformer have no meaning for it.
        shared = ("data.", "train", "seed", "device", "model.width", "model.centres")
        pretraining = [text for text in common if text.startswith(shared)]
        recipe = load("cloud_contrastive", pretraining, registry)
        result = run(recipe, registry, Workspace(), NoOutput())
        settings.append(f"model.init_from={result.run_dir}")
    recipe = load("grasp_diffusion", [f"train.updates={UPDATES}", *settings], registry)
    pipeline = assemble(recipe)
    step = Step(pipeline)
    start = time.perf_counter()
    while pipeline.progress.fraction < 1:
        step()
    seconds = time.perf_counter() - start
    yield part, {"seconds": round(seconds, 1), **metrics(pipeline)}
    if part != "default":
        return
    state = pipeline.learner.complete_state()
    for name, config in STAGES.items():
        if isinstance(config, ConsistencyConfig):
            config = config.model_copy(update={"updates": students})
        trained_model = assemble(recipe)
        trained_model.learner.load_complete_state(state)
        # The student is trained once for both numbers of evaluations.
        trained_model.folder = workspace
        start = time.perf_counter()
        trained_model.attach_to_learnt({config.kind: config})
        seconds = time.perf_counter() - start
        yield name, {"seconds": round(seconds, 1), **metrics(trained_model)}


def metrics(pipeline: Pipeline) -> dict[str, float]:
    """Returns the metrics of an evaluation that the table has."""
    values = evaluated(pipeline)
    return {name: float(values[name]) for name in METRICS}


def chamfer_times() -> dict[str, Any]:
    """Returns how long the distance and its gradient take, in interleaved rounds, for a batch of
    the default recipe: 256 pairs of hands with 134 points each.
    """
    generator = torch.Generator().manual_seed(0)
    sets = torch.randn(2, 256, 134, 3, generator=generator)

    def seconds(distance: Any) -> float:
        left = sets[0].clone().requires_grad_()
        start = time.perf_counter()
        distance(left, sets[1]).sum().backward()
        return time.perf_counter() - start

    ratios = [seconds(written_out) / seconds(chamfer) for _ in range(ROUNDS)][1:]
    ratios.sort()
    tail = len(ratios) // 20
    return {"ratio": median(ratios), "lower": ratios[tail], "upper": ratios[-1 - tail]}


def written_out(points: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns the same as ``chamfer``, with gradients through all P x Q distances."""
    difference = points[:, :, None] - others[:, None]
    squared = difference.square().sum(-1)
    return squared.amin(2).mean(1) + squared.amin(1).mean(1)


def interval(values: Sequence[float]) -> str:
    """Returns the mean of paired differences with its 95 % interval."""
    if len(values) != len(SEEDS):
        return f"{fmean(values):+.3f} ({len(values)} seeds)"
    mean, low, high = student(values)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of README.md."""
    lines = [
        "# What are further parts of the models of grasps worth?",
        "",
        f"`python experiments/grasp_parts/parts.py` trains `grasp_diffusion` with {UPDATES:,} updates (`default`),",
        "and variants with one change each, three seeds of each ([docs/grasps.md](../../docs/grasps.md)).",
        "",
    ]
    by_part: dict[str, dict[int, Mapping[str, Any]]] = {}
    for result in results:
        if result["part"] != TIME:
            by_part.setdefault(result["part"], {})[result["seed"]] = result
    if not by_part:
        return "\n".join([*lines, "Not measured yet.", ""])

    lines += [
        "Means of all seeds; differences from `default` with the same seed, with a 95 % interval. Variants with",
        "a table are not straightened either, so they are compared with each other.",
        "",
        f"| part | {' | '.join(METRICS)} | strict, difference | q1, difference |",
        f"|---{'|---' * (len(METRICS) + 2)}|",
    ]
    default = by_part.get("default", {})
    for part, runs in by_part.items():
        cells = [f"{fmean(run[name] for run in runs.values()):.3f}" for name in METRICS]
        for name in ("strict", "q1"):
            pairs = [run[name] - default[seed][name] for seed, run in runs.items() if seed in default]
            cells.append("" if part == "default" or not pairs else interval(pairs))
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines.append("")
    for result in results:
        if result["part"] == TIME:
            lines += [
                "The Chamfer distance of 256 pairs of 134 points with its gradient: the matrix of all",
                f"squared differences takes {result['ratio']:.2f}x [{result['lower']:.2f}, "
                f"{result['upper']:.2f}] of the time of `chamfer` (median and 90 % of {ROUNDS - 1}",
                "interleaved rounds).",
                "",
            ]
    last = results[-1]
    return "\n".join([*lines, f"{last['date']}, {last['machine']}.", ""])


if __name__ == "__main__":
    main()
