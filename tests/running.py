"""Recipes small enough to train in a second, in this process or in a child."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from children import start

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.tracking import Workspace
from runner.training.outputs import NoOutput as NoDisplay
from runner.training.pipeline import assemble
from runner.training.result import RunResult
from runner.training.run import run

RECIPES = Path(__file__).parent.parent / "recipes"
SERVED = {"grasp_serve"}
"""Recipes that are trained as those that they extend."""
TRAINED = sorted({path.stem for path in RECIPES.glob("*.yaml")} - SERVED)
TINY = (
    "model.hidden=[8, 8]",
    "data.envs=4",
    "data.evaluation.episodes=5",
    "data.replay.capacity=1000",
    "data.warmup=64",
    "train.env_steps=120",
    "train.batch_size=16",
    "train.log_every=40",
    "train.evaluate_every=80",
    "train.checkpoint_every=80",
    "tracking.system_metrics=false",
    "device=cpu",
)


TINY_UAV = (*TINY, "data.replay.kind=prioritized", "data.episode_limit=30", "data.followers=1")
TINY_DIGITS = (
    "model.widths=[8]",
    "data.held_out=1000",
    "train={epochs: 2, batch_size: 64, log_every: 1, evaluate_every: 1, checkpoint_every: 1}",
    "tracking.system_metrics=false",
    "device=cpu",
)
TINY_CONV = (
    *("model.width=8", "data.held_out=1000", "data.scale=1", "data.limit={train: 0.5, held_out: 0.2}"),
    "train={updates: 6, batch_size: 16, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    "tracking.system_metrics=false",
    "device=cpu",
)
TINY_MLP = (
    *("model.widths=[8]", "data.held_out=1000", "data.scale=1"),
    "train={epochs: 2, batch_size: 64, log_every: 1, evaluate_every: 1, checkpoint_every: 1}",
    "tracking.system_metrics=false",
    "device=cpu",
)
TINY_TEXT = (
    *("data.synthetic=true", "model.layers=1", "model.width=16", "data.context=16", "data.held_out=0.005"),
    *("train.tokens=2560", "train.batch_size=4"),
    *("train.log_every=256", "train.evaluate_every=1280", "train.checkpoint_every=1280"),
    "tracking.system_metrics=false",
    "device=cpu",
)
TINY_RECALL = (
    *("model.layers=1", "model.width=8", "model.heads=1", "data={kind: recall, pairs: 4, queries: 6, held_out: 8}"),
    "train={updates: 6, batch_size: 4, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    "tracking.system_metrics=false",
    "device=cpu",
)
TINY_GPT, TINY_MAMBA2 = ("model.heads=2", *TINY_TEXT), ("model.head_width=8", *TINY_TEXT)
QUIETLY = ("tracking.system_metrics=false", "device=cpu")
TINY_GRAPH = (  # of digits, which scikit-learn brings
    "data.synthetic=true", "model.width=4",
    "train={epochs: 6, batch_size: 1, log_every: 1, evaluate_every: 3, checkpoint_every: 2}", *QUIETLY,
)  # fmt: skip
TINY_CONTEXTS = (
    # Without test nodes, a strength of the probe need not be selected.
    *("data.synthetic=true", "data.held_out=validation", "data.context=6", "data.components=8", "data.steps=2"),
    *("model.width=8", "model.heads=2", "model.layers=1"),
    "train={updates: 6, batch_size: 64, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",  # few batches are all
    *QUIETLY,
)
TINY_MOLECULES = (
    *(f"data.file={Path(__file__).parent / 'boiling_points.csv'}", "model.width=8", "model.heads=2", "model.layers=1"),
    "data.split=0",
    "train={updates: 6, batch_size: 8, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    *QUIETLY,
)
TINY_GRASPS = (
    *("data.synthetic=true", "data.points=32", "data.grasps=2", "data.scenes=4"),
    *("model.centres=4", "model.neighbours=4", "model.width=8", "model.heads=2", "model.layers=1"),
    "train={updates: 6, batch_size: 4, ema: 0.9, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    *QUIETLY,
)
TINY_CLOUDS = (
    *("data.synthetic=true", "data.points=32", "data.grasps=2", "data.scenes=4"),
    *("model.centres=4", "model.neighbours=4", "model.width=8"),
    "train={updates: 6, batch_size: 4, ema: 0.9, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    *QUIETLY,
)
TINY_RADIANCE = (
    *(f"data.file={Path(__file__).parent / 'boxes.npz'}", "data.held_out=3"),
    *("model.width=8", "model.layers=2", "model.latent=4", "model.samples=4", "model.patch=8"),
    "train={updates: 6, batch_size: 4, ema: 0.9, log_every: 1, evaluate_every: 3, checkpoint_every: 2}",
    *QUIETLY,
)
SMALL = {
    "graf": TINY_RADIANCE, "cloud": TINY_CLOUDS,
    "grasp_diffusion": ("model.steps=4", "model.sampling_steps=4", *TINY_GRASPS), "grasp_cvae": TINY_GRASPS,
    "grasp_latent": ("model.steps=4", "model.sampling_steps=4", "model.latent=6", *TINY_GRASPS),
    "grasp_serve": ("model.steps=4", "model.sampling_steps=4", "inference.ddim.steps=2", *TINY_GRASPS),
    "marl_spread": TINY, "marl": TINY_UAV, "digits": TINY_DIGITS, "conv": TINY_CONV,
    "mlp": TINY_MLP,
    "shakespeare": TINY_GPT, "mamba2": TINY_MAMBA2,
    "recall": TINY_RECALL,
    "gpt2": ("optimization.gradient_accumulation.micro_batch=2", *TINY_GPT),
    "gcn": TINY_GRAPH, "emma": TINY_GRAPH, "pgt": TINY_CONTEXTS, "gps": TINY_MOLECULES, "graphgpt": TINY_MOLECULES,
}  # fmt: skip
"""By the beginning of a recipe's name."""
BESIDE = {
    "algorithm_search": ["optimization.algorithm_search={seconds: 0}"],
    "batch_autotune": ["optimization.batch_autotune={largest: 16}"],
    "associative_scan": ["optimization.chunked_scan=off"],
    "propagation_cache": ["model.input_dropout=0"],
    "merged_guidance": ["model.guidance=1"],
    "grouping_cache": ["data.clouds=3"],
    # Each collection looks at all that the tests have imported.
    "delete_tensors": ["optimization.delete_tensors={every: 10}"],
}
"""Settings with which a stage is cheap enough for a test, or can be there at all."""
COMPANY = {"compile": ("stacked_agents",)}
"""What keeps a stage cheap enough with the flagship: three functions to compile instead of three for every agent."""


def tiny(name: str, *sets: str, registry: Registry | None = None) -> Recipe:
    """A recipe that ships, made small."""
    return load(RECIPES / f"{name}.yaml", [*settings_of(name), *sets], registry or Registry())


@cache
def shipped(name: str) -> Recipe:
    """Returns the same for callers that only look at it: they all get one object."""
    return tiny(name)


def settings_of(name: str) -> tuple[str, ...]:
    """What makes a recipe that ships small."""
    return next(small for beginning, small in SMALL.items() if name.startswith(beginning))


def with_requirements(kind: str, name: str = "marl_baseline") -> list[str]:
    """A stage and all that it requires, as ``--set`` arguments for a recipe that ships."""
    flagship = name.startswith("marl")
    sets = [f"optimization.{kind}=on", *BESIDE.get(kind, ()), *["model.hidden=[8]"] * (flagship and kind == "compile")]
    for other in (*Registry().get("optimization", kind).requires, *(COMPANY.get(kind, ()) if flagship else ())):
        sets += with_requirements(other, name)
    return sets


@cache
def host_of(kind: str) -> str:
    """A recipe that ships and that a stage can work with: the flagship's baseline, or else another family's."""
    first = ("marl_baseline", "digits_classifier", "shakespeare_gpt", "mamba2_shakespeare")
    for name in (*first, *(name for name in TRAINED if name not in first)):
        try:
            recipe = tiny(name, *with_requirements(kind, name))
            # A stage that is inactive changes nothing.
            if recipe.stages[kind].prepares or assemble(recipe).reports[kind].active:
                return name
        except UsageError:
            continue
    raise AssertionError(f"no recipe that ships can have '{kind}'")


def train_here(name: str, *sets: str, registry: Registry | None = None) -> RunResult:
    """Trains in this process."""
    registry = registry or Registry()
    return run(tiny(name, *sets, registry=registry), registry, Workspace(), NoDisplay())


def runner(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command line as a shell starts it."""
    command = [sys.executable, "-m", "runner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def run_tiny(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``runner run`` of a small recipe in a child process that has imported everything."""
    sets = [part for setting in TINY_UAV for part in ("--set", setting)]
    return forked("run", str(RECIPES / f"{name}.yaml"), *sets, *arguments)


def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a child process that has imported everything."""
    with TemporaryDirectory() as folder:
        child = start(Path(folder), *arguments)
        return subprocess.CompletedProcess(arguments, child.wait(), child.stdout, child.stderr)


def result_of(child: subprocess.CompletedProcess[str]) -> dict:
    """What ``--json`` printed."""
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)
