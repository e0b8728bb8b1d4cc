"""Trains a recipe without a trace, for the metrics that come out; run as a child process by ``runner verify``."""

from runner.child.protocol import Parent
from runner.system import generators
from runner.train.assemble import assemble
from runner.train.loop import Loop, evaluated
from runner.train.signals import Stop


class Nowhere:
    """Keeps nothing of what is logged, and shows nothing."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Forgets the metrics."""

    def mark(self) -> int:
        """Nothing is resumed."""
        return 0

    def sync(self) -> None:
        """Nothing is written."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Shows nothing."""


def main(parent: Parent) -> None:
    """Trains the recipe and tells ``{"before": {...}, "after": {...}}``, its evaluations."""
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, batch_size=parent.options["batch_size"])
    before = evaluated(pipeline)
    loop = Loop(pipeline, parent.folder, Nowhere(), Nowhere(), Stop())
    loop.run()
    after = {name.removeprefix("eval/"): value for name, value in loop.metrics.items() if name.startswith("eval/")}
    parent.tell(before=before, after=after)
