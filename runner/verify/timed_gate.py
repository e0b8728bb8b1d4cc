"""The gate without trainings, in a separate process, so that a slow verdict can be abandoned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from runner.child.protocol import Parent
from runner.child.spawn import Cause, Child, ChildError
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system.processor import share_processor
from runner.verify.variants import weakest


class TimedGate(ExitStack):
    """Judges sets of stages of one recipe after the other; INCONCLUSIVE without a verdict
    in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._child: Child | None = None
        self._recipe: Recipe | None = None

    def __call__(
        self, recipe: Recipe, registry: Registry, stages: Sequence[str], seconds: float
    ) -> Verdict:
        """Returns the verdict without any training, within the given seconds."""
        if self._child is None or recipe is not self._recipe:
            self.close()
            self._recipe = recipe
            child = Child(
                "runner.verify.timed_gate", recipe, plugin_files=registry.files
            )
            self._child = self.enter_context(child)
        try:
            reply = self._child.ask(",".join(stages), seconds)
        except ChildError as error:
            # The next set gets another process.
            self._child = None
            summary = f"it cannot be judged: {error}"
            if error.cause is Cause.HUNG:
                summary = f"no verdict within the {seconds:.0f} s that were left"
            contract = type(weakest(recipe, stages)).__name__
            return Verdict(Outcome.INCONCLUSIVE, contract, summary)
        return Verdict(Outcome(reply["outcome"]), reply["contract"], reply["summary"])


def main(parent: Parent) -> None:
    """Judges one set after the other."""
    recipe, registry = parent.load()
    with share_processor(recipe.system.threads, recipe.system.wait):
        for stages in parent.commands():
            verdict = quick(recipe, registry, stages.split(","))
            parent.tell(
                outcome=str(verdict.outcome),
                contract=verdict.contract,
                summary=verdict.summary,
            )


def quick(recipe: Recipe, registry: Registry, stages: Sequence[str]) -> Verdict:
    """The verdict without any training: what only trainings can show stays INCONCLUSIVE."""
    from runner.verify.gate import Gate
    from runner.verify.options import Options

    options = Options(updates=6, horizon=0, budget=0.0, names_operators=False)
    return Gate(recipe, registry, options, lambda _: None)(stages)
