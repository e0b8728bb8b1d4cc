"""The gate for several processes, without trainings, in processes of its own."""

from __future__ import annotations

from collections.abc import Sequence

from runner.child.group import ChildGroup
from runner.child.protocol import Parent
from runner.child.spawn import Cause, ChildError
from runner.distributed.membership import connected
from runner.plugin.contract import Statistical
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system.processor import share_processor
from runner.verify.process_pair import compare_processes, mirror
from runner.verify.variants import weakest

UPDATES = 6
"""Compared updates."""


class GroupGate:
    """Judges whether several processes with a set of stages train like one process with it.

    Args:
        count: Number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(
        self, recipe: Recipe, registry: Registry, stages: Sequence[str], seconds: float
    ) -> Verdict:
        """Returns the verdict without any training, within the given seconds."""
        contract = weakest(recipe, stages, self.count)
        name = type(contract).__name__
        if isinstance(contract, Statistical):
            summary = "only trainings could tell, which this gate does not compare"
            return Verdict(Outcome.INCONCLUSIVE, name, summary)
        group = ChildGroup(
            "runner.verify.group_gate",
            recipe,
            self.count,
            plugin_files=registry.files,
            options={"stages": list(stages)},
        )
        try:
            with group:
                reply = group.answer(seconds)
        except ChildError as error:
            summary = f"it cannot be judged: {error}"
            if error.cause is Cause.HUNG:
                summary = f"no verdict within the {seconds:.0f} s that were left"
            return Verdict(Outcome.INCONCLUSIVE, name, summary)
        return Verdict(Outcome(reply["outcome"]), reply["contract"], reply["summary"])


def main(parent: Parent) -> None:
    """Judges a set of stages, and tells the verdict in the first process."""
    recipe, registry = parent.load()
    stages = parent.options["stages"]
    with (
        connected(
            parent.options["group"], recipe.device, recipe.train.stall_s
        ) as group,
        share_processor(recipe.system.threads, recipe.system.wait),
    ):
        assert group is not None
        if group.rank:
            mirror(recipe, registry, stages, group)
            parent.tell()
            return
        verdict = compare_processes(recipe, registry, stages, group, UPDATES)
        parent.tell(
            outcome=str(verdict.outcome),
            contract=verdict.contract,
            summary=verdict.summary,
        )
