"""Compares the slots that stages change, for inputs of other shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.trajectory import Update
from runner.proof.trees import on_host
from runner.proof.verdict import Verdict
from runner.verify.evaluation_checks import same_answers
from runner.verify.input_shapes import keep_answered, reshape_inputs
from runner.verify.slot_calls import SlotCall, record_slot_calls, slot_calls

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

MOST_SLOTS = 3
"""Slots that are compared."""
MOST_SHAPES = 4
"""Shapes of each slot."""


class SlotShapesCheck(Check):
    """Calls each slot that a stage changes with inputs of other shapes than the recipe's."""

    name = "shapes of slots"
    question = "Does a step that the stage changes compute the same for inputs of other shapes?"
    catches = (
        "a remainder that a kernel leaves out or fills up; a size of the recipe that is "
        "assumed; a cache by the number of elements"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that a compiler traces or
        that change no slot.
        """
        return pair.has_long_checks and not pair.is_traced and bool(_slots(pair))

    def cost(self, pair: StagePair) -> str:
        """Returns the most calls."""
        return f"up to {2 * MOST_SHAPES} calls of up to {MOST_SLOTS} slots"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares results by bits or algebra, of inputs that the baseline accepts."""
        baseline = pair.baseline
        states = baseline.questions[0].states or {}
        # An index that is out of range is an exception on a CPU; on a GPU, it ends the
        # process.
        on_cpu = replace(pair.recipe, device="cpu")
        calls = record_slot_calls(on_cpu, baseline.registry, _slots(pair))[:MOST_SLOTS]
        updates = [Update(variant) for call in calls for variant in _variants(call)]
        build = slot_calls(on_cpu, baseline.registry, ())
        answered = keep_answered(build, on_host(states), updates)
        if not answered:
            return pair.passed("no slot accepts inputs of other shapes")
        updates = [replace(answered[0], states=states), *answered[1:]]
        return same_answers(*pair.builds(slot_calls), updates, pair.contract)


def _slots(pair: StagePair) -> set[str]:
    """Returns the slots of the learner that the stages declare."""
    stages = pair.recipe.stages
    declared = {
        slot
        for kind in pair.stages
        if kind in stages
        for slot in stages[kind].wraps | stages[kind].claims
    }
    return declared & {*pair.recipe.model.slots}


def _variants(call: SlotCall) -> list[SlotCall]:
    """Returns the call with other shapes, each with and without gradients."""
    variants = reshape_inputs(call.inputs)[:MOST_SHAPES]
    return [
        call._replace(inputs=inputs, predicts=predicts)
        for inputs in variants
        for predicts in (False, True)
    ]
