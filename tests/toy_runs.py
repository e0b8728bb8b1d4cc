"""Recipes of the learners in ``toys.py``."""

from contextlib import nullcontext
from pathlib import Path

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble
from runner.training.signals import Stop

TOYS = Path(__file__).with_name("toys.py")
RECIPE = """
name: toy
seed: 5
device: cpu
model: {kind: toy}
data: {kind: toy_words}
optimizer: {lr: 1e-2}
train: {batch_size: 8}
tracking: {experiment: toys, system_metrics: false}
"""


def written(folder, *sets):
    """A recipe's file and its command line, to train it."""
    path = folder / "toy.yaml"
    path.write_text(RECIPE)
    pairs = [part for setting in sets for part in ("--set", setting)]
    return ["run", str(path), "--quiet", "--json", "--plugin", str(TOYS), *pairs]


def toy(folder, *sets):
    """The same recipe, validated."""
    written(folder)
    return load(folder / "toy.yaml", [*sets], Registry([TOYS]))


def toy_pipeline(folder, *sets):
    """The same, assembled."""
    return assemble(toy(folder, *sets), [TOYS])


class SilentSeeds(NoOutput):
    """Displays nothing about several trainings."""

    def show_seeds(self, steps):
        """Shows nothing."""


class Notes:
    """Keeps what is logged and shown."""

    def __init__(self):
        self.points = {}
        self.shown, self.phases, self.best = [], [], []

    def log(self, metrics, step):
        for name, value in metrics.items():
            self.points.setdefault(name, []).append((step, value))

    def mark(self):
        return 0

    def sync(self):
        pass

    def advance(self, step, metrics):
        self.shown.append(step)

    def phase(self, name):
        self.phases.append(name)
        return nullcontext()

    def improved(self, best):
        self.best.append(best)


def trained(folder, pipeline):
    """The loop of a training that is over, and what it logged."""
    notes = Notes()
    loop = Loop(pipeline, folder / "run", notes, notes, Stop())
    loop.run()
    return loop, notes
