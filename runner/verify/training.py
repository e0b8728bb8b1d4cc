"""Trains a recipe without a trace, for the metrics that come out; run as a child process by ``runner verify``."""

import json
import sys
import tempfile
from pathlib import Path

from runner.plugin.registry import Registry
from runner.recipe import load
from runner.system import generators
from runner.system.errors import RunnerError
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


def main() -> int:
    """Trains the recipe in a file and prints ``{"before": {...}, "after": {...}}``, its evaluations, as JSON."""
    path, *plugin_files = sys.argv[1:]
    try:
        found = _train(Path(path), [Path(each) for each in plugin_files])
    except RunnerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    print(json.dumps(found))  # noqa: T201 (the parent reads it)
    return 0


def _train(path: Path, files: list[Path]) -> dict[str, dict[str, float]]:
    recipe = load(path, (), Registry(files))
    path.unlink()  # it may hold secrets, and nobody tidies up after a kill
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, files)
    before = evaluated(pipeline)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(pipeline, Path(folder), Nowhere(), Nowhere(), Stop())
        loop.run()
    after = {name.removeprefix("eval/"): value for name, value in loop.metrics.items() if name.startswith("eval/")}
    return {"before": before, "after": after}


if __name__ == "__main__":
    sys.exit(main())
