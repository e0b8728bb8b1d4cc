"""A stage that puts changed methods of the learner into the slots of the same name; whoever makes it gives them."""

from types import MethodType

from runner.api import Close, Stage, StageConfig

CHANGED = {}
"""Functions by the name of their slot."""


def change(functions):
    """These, which the stage then also declares."""
    CHANGED.update(functions)
    MutatedSlotConfig.claims = frozenset(CHANGED)


class MutatedSlotConfig(StageConfig):
    """Replaces slots by changed copies of what they hold."""

    kind = "mutated_slot"
    implementation = "MutatedSlot"
    phase = 1

    def contract(self, setting):
        return Close()


class MutatedSlot(Stage):
    def attach(self, pipeline):
        for name, function in CHANGED.items():
            pipeline.slots.replace(name, MethodType(function, pipeline.learner))
